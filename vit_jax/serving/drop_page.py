"""The server's web page, onto which users drop a photograph."""

from collections.abc import Mapping

from vit_jax.inspection.html_page import render

NEAREST = 8


def drop_page(
    title: str,
    about: str,
    layer: str,
    folder: str = "",
    names: str | None = None,
    colours: Mapping[str, str] | None = None,
) -> str:
    """Returns the page as HTML.

    Args:
      about: text below the title.
      layer: the picture that is shown over the photograph: `heat` (attention), `overlay` (classes
        or objects), or empty for none.
      folder: folder in which similar images are searched; empty: no similar images are shown.
      names: placeholder in the field for class names, such as the server's names; None: the page
        has no such field.
      colours: colour of each class in the overlay, by class name; None: there is no overlay.
    """
    asked = ["seen=1", *[f"{layer}=1"] * bool(layer), *[f"neighbours={NEAREST}"] * bool(folder)]
    query = "&".join(asked)
    values = dict(layer=layer, folder=folder, query=query, names=names, colours=colours or {})
    return render("drop.html", title=title, about=about, **values)
