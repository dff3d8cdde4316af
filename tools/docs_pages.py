"""Give mkdocs the pages that are not files under docs: the reference and the benchmark results."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = ("benchmarks", "examples")
# A link from docs/ or docs/guides/ to a file beside docs.
_LEAVES_DOCS = re.compile(rf"\]\(((?:\.\./)+)((?:{'|'.join(OUTSIDE)})/)")


def public_packages() -> list[str]:
    """Return the dotted names of the packages and modules with public names, in order."""
    source = ROOT / "src" / "fivefold"
    found = [*source.glob("*/__init__.py"), *source.glob("*/*/__init__.py")]
    exporting = [path.parent for path in found if "__all__" in path.read_text()]
    names = {".".join(path.relative_to(source).parts) for path in exporting}
    below = {"errors", "measured", "reading", "units"}
    return sorted(name for name in names | below if not re.search(r"(^|\.)_", name))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the generated pages to the navigation."""
    results = sorted((ROOT / "benchmarks").rglob("*.md"))
    config.nav += [
        {"Reference": [f"reference/{name}.md" for name in public_packages()]},
        {"Benchmarks": [path.relative_to(ROOT).as_posix() for path in results]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a reference page for each package, and the files beside docs that pages link to."""
    for name in public_packages():
        text = f"# fivefold.{name}\n\n::: fivefold.{name}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for folder in OUTSIDE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".md", ".py", ".toml"}:
                uri = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs' signature
    """Point links to files beside docs at the copies that `on_files` added."""
    return _LEAVES_DOCS.sub(lambda link: f"]({link[1][3:]}{link[2]}", markdown)
