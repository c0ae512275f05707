"""Write what is made from the code and has changed: pages of docs/reference, and what the Tab key offers."""

from docs.generate import FOLDER, make_pages, stale_pages

texts = make_pages()
FOLDER.mkdir(exist_ok=True)
for path in stale_pages():
    path.write_text(texts[path])
    print(f"wrote {path.relative_to(FOLDER.parent.parent)}")
