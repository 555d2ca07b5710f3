"""Hooks of mkdocs.yml: the site has the folders of the repository, so that every link of a page works in both.

Pages of the reference are made from the registries, a module each.
"""

import json
import re
import sys
from pathlib import Path

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from lit_memory.registry import MODELS, TASKS, class_name  # noqa: E402

PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "benchmarks/README.md",
    "reports/README.md",
    "reports/**/README.md",
]
BESIDE = ["reports/index.html", "reports/*/**/*.*", "experiments/*.yaml", "tests/*.py", "docs/*.svg"]
PARTS = {
    "recurrence": ["protocol", "state", "unroll", "generate", "schedules", "replay", "loss"],
    "memory": ["associative", "episodic", "neural", "scan"],
}


def reference() -> dict[str, str]:
    """Address of a page -> its text."""
    pages = {}
    for folder, registry in {"models": MODELS, "tasks": TASKS}.items():
        for name, path in registry.items():
            pages[f"reference/{folder}/{name}.md"] = (class_name(path), [path.partition(":")[0]])
    for folder, names in PARTS.items():
        for name in names:
            pages[f"reference/{folder}/{name}.md"] = (name.capitalize(), [f"lit_memory.{folder}.{name}"])
    pages["reference/lightning.md"] = ("Lightning", ["lit_memory.lit.modules", "lit_memory.lit.data"])
    pages["reference/testing.md"] = ("Checks", ["lit_memory.testing.models", "lit_memory.testing.tasks"])
    return {
        page: "\n\n".join([f"# {title}", *(f"::: {m}" for m in modules)]) for page, (title, modules) in pages.items()
    }


def notebooks() -> dict[str, str]:
    """Address of a page -> its text: the cells of every notebook."""
    pages = {}
    for path in sorted(ROOT.glob("docs/notebooks/*.ipynb")):
        cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(path.read_text())["cells"]]
        text = "\n\n".join(f"```python\n{source}\n```" if kind == "code" else source for source, kind in cells)
        pages[str(path.relative_to(ROOT).with_suffix(".md"))] = text
    return pages


class Docstrings(griffe.Extension):
    """Our docstrings as Markdown: what they say of an argument, and every deviation, is an item of a list."""

    def on_instance(self, *, obj: griffe.Object, **others) -> None:
        if obj.docstring:
            text = re.sub(r"(?<=\w)\*(?=\w)", r"\\*", obj.docstring.value)
            text = re.sub(r"^([a-z_]\w*(?:, [a-z_]\w*)*): ", r"- `\1`: ", text, flags=re.MULTILINE)
            text = re.sub(r"^(Paper|Data|Reference|Deviations)\b(:?) *", r"\n**\1**\2 ", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"(?<!\n)\n(?=(?:- `|1\. ))", "\n\n", text)


def on_files(files: Files, config) -> Files:
    """The files of the site: those of the theme, and ours at their places in the repository."""
    ours = [path for pattern in [*PAGES, *BESIDE] for path in sorted(ROOT.glob(pattern))]
    found = {str(path.relative_to(ROOT)): path for path in ours}
    made = [File.generated(config, uri, abs_src_path=str(path)) for uri, path in found.items()]
    made += [File.generated(config, uri, content=text) for uri, text in {**reference(), **notebooks()}.items()]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *made])


def on_config(config):
    """The menu: the guide, what was found, the reference."""
    pages = list(reference())
    reports = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("reports/*/**/README.md"))]
    guide = dict.fromkeys(re.findall(r"\((docs/\w+\.md)\)", (ROOT / "README.md").read_text()))  # in its order
    books = dict.fromkeys(re.findall(r"\((docs/notebooks/\w+)\.ipynb\)", (ROOT / "README.md").read_text()))
    named = {"models": "Models", "tasks": "Tasks", "recurrence": "Recurrence", "memory": "Memories"}
    parts = [{title: [p for p in pages if p.startswith(f"reference/{folder}/")]} for folder, title in named.items()]
    config.nav = [
        {"Start": "README.md"},
        {"Guide": [*(f"{book}.md" for book in books), *guide, "benchmarks/README.md"]},
        {"Reports": ["reports/README.md", *({str(Path(r).parent.relative_to("reports")): r} for r in reports)]},
        {"Reference": [*parts, "reference/lightning.md", "reference/testing.md"]},
        {"Project": ["CONTRIBUTING.md", "CHANGELOG.md"]},
    ]
    return config


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Notebooks are pages here. Links into the repository that are no pages lead to nothing: the words stay."""
    here = Path(page.file.src_uri).parent

    def shown(link: re.Match) -> str:
        address = re.sub(r"\.ipynb$", ".md", link[2])
        target = address.partition("#")[0]
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        path = (ROOT / here / target).resolve()
        uri = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
        return f"[{link[1]}]({address})" if uri in files.src_uris else link[1]

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", shown, markdown)
