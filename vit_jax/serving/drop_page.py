"""Page of the server, on which a photograph is dropped."""

from vit_jax.inspection.html_page import render

NEAREST = 8


def drop_page(title: str, about: str, heat: bool, folder: str, names: str | None = None) -> str:
    """Returns the page as HTML.

    Args:
      about: text below the title.
      heat: show attention rollout over the image.
      folder: folder of the nearest images; empty: none are shown.
      names: the server's class names, in words, where a request can have others; None: it cannot.
    """
    asked = ["seen=1", *["heat=1"] * heat, *[f"neighbours={NEAREST}"] * bool(folder)]
    query = "&".join(asked)
    values = dict(heat=heat, folder=folder, query=query, names=names)
    return render("drop.html", title=title, about=about, **values)
