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
      layer: layer that is shown over the image: `heat`, `overlay`, or empty.
      folder: folder of the nearest images; empty: no nearest images are shown.
      names: text with the server's class names, if requests can have others; None: they cannot.
      colours: colours of classes in the overlay, by name; None: there is no overlay.
    """
    asked = ["seen=1", *[f"{layer}=1"] * bool(layer), *[f"neighbours={NEAREST}"] * bool(folder)]
    query = "&".join(asked)
    values = dict(layer=layer, folder=folder, query=query, names=names, colours=colours or {})
    return render("drop.html", title=title, about=about, **values)
