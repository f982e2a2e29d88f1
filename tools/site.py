"""Hooks of mkdocs (see mkdocs.yml): the pages that are made from code, and the texts of the project outside docs/."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

import partita
from partita import cli
from partita.providers.resolve import known_providers

ROOT = Path(__file__).parent.parent
PROJECT = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "benchmarks/results/README.md": "project/results.md",
}
"""Pages outside docs/ -> where the site has them."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and those of the project. A hook of mkdocs."""
    pages = {PROJECT[name]: (ROOT / name).read_text(encoding="utf-8") for name in PROJECT}
    pages |= {"reference/cli.md": "".join(command_line()), "reference/api.md": "".join(interface())}
    pages["reference/provider-options.md"] = "".join(provider_options())
    pages["reference/schemas.md"] = "".join(schemas())
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at where the site has a page, and turn links to other files of the project into their names."""
    source = page.file.src_uri
    origin = next((name for name, target in PROJECT.items() if target == source), f"docs/{source}")

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match["path"]))
        target = PROJECT.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(target) is None:
            return f"https://example.invalid/{path}"
        return posixpath.relpath(target, posixpath.dirname(source)) + (match["anchor"] or "")

    linked = LINK.sub(moved, markdown)
    return re.sub(r"\[([^\]]*)\]\(https://example\.invalid/[^)]*\)", r"\1", linked)


def command_line() -> Iterator[str]:
    """The reference of the command line: the help of every verb."""
    yield "# Command line\n\nThe output of `partita VERB --help`.\n"
    group: Any = typer.main.get_command(cli.app)
    yield from _help(group, typer.Context(group, info_name=cli.PROGRAM))


def _help(command: Any, context: Any) -> Iterator[str]:
    """The help of a command and of the commands in it, a section each."""
    level = "##" if context.parent is None else "###"
    yield f"\n{level} {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    for name in getattr(command, "list_commands", lambda _: ())(context):
        each = command.get_command(context, name)
        yield from _help(each, typer.Context(each, info_name=name, parent=context))


def interface() -> Iterator[str]:
    """The reference of the Python interface: every name of `partita.__all__`."""
    yield "# Python API\n\nHow to use it: [Python](../python.md).\n"
    for name in sorted(set(partita.__all__) - {"__version__", "errors"}, key=str.swapcase):
        found = getattr(partita, name)
        if inspect.isclass(found):
            methods = inspect.getmembers_static(found, inspect.isfunction)
            calls = [each for each, method in methods if "__signature__" in vars(method)]
            hidden = "".join(f'\n            - "!^{each}$"' for each in calls)
            filters = f'\n    options:\n        filters:\n            - "!^_"{hidden}\n' if calls else "\n"
            yield f"\n::: {found.__module__}.{name}{filters}"
            for each in calls:
                yield from _function(f"{name}.{each}", getattr(found, each))
        else:
            yield from _function(f"partita.{name}", found)


def _function(name: str, function: Any) -> Iterator[str]:
    """A section for a function whose arguments come from an options dataclass: signature, docstring, arguments."""
    text, _, arguments = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    shown = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    yield f"\n## {name}\n\n```python\n{textwrap.fill(name + shown, 76, subsequent_indent='    ')}\n```\n\n{text}\n\n"
    if arguments:
        yield "| argument | type | meaning |\n|---|---|---|\n"
    for entry in re.split(r"\n(?=    \w+: )", arguments) if arguments else ():
        argument, _, meaning = " ".join(entry.split()).partition(": ")
        kind = inspect.formatannotation(signature.parameters[argument].annotation).replace("|", "\\|")
        yield f"| `{argument}` | {re.sub(r'[a-z]+[.](?:[a-z]+[.])?', '', kind)} | {meaning} |\n"


def provider_options() -> Iterator[str]:
    """The reference of `--provider-option`: the options of every provider, from its file in partita/providers."""
    yield "# Provider options\n\n`--provider-option PROVIDER.NAME=VALUE`; in Python `provider_options={name: {...}}`.\n"
    unchecked = ", ".join(each.name for each in known_providers().values() if each.any_option)
    yield f"\nOptions of these providers are passed on unchecked, with a note: {unchecked}.\n"
    for provider in known_providers().values():
        if provider.options:
            yield f"\n## {provider.name}\n\n| option | kind | default | meaning |\n|---|---|---|---|\n"
        for each in provider.options:
            kind = ", ".join(each.choices) or each.kind
            yield f"| `{each.name}` | {kind} | {each.default} | {each.meaning} |\n"


def schemas() -> Iterator[str]:
    """The reference of the JSON files: the fields of every record, from the schemas in docs/ and the docstrings."""
    yield "# Schemas\n\nThe records of `--json`, of reports and of packages. Names: [Output of --json](../json.md).\n"
    documented = _field_docstrings()
    for file in sorted((ROOT / "docs").glob("*.schema.json")):
        schema = json.loads(file.read_text(encoding="utf-8"))
        yield f"\n## {file.name.removesuffix('.schema.json')}\n\n[{file.name}](../{file.name})\n"
        for record in (schema, *schema.get("$defs", {}).values()):
            if "properties" in record:
                yield f"\n**{record['title']}**: {record.get('description', '')}\n\n"
                yield "| field | type | meaning |\n|---|---|---|\n"
            for name, field in record.get("properties", {}).items():
                meaning = documented.get((record["title"], name), "").replace("|", "\\|")
                yield f"| `{name}` | {_kind(field)} | {meaning} |\n"


def _field_docstrings() -> dict[tuple[str, str], str]:
    """The docstrings below the fields of every class of the package, by class and field; a class has its bases'."""
    classes = {
        node.name: node
        for file in (ROOT / "partita").rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    found: dict[tuple[str, str], str] = {}
    for name in classes:
        lineage = [name]
        for each in lineage:
            lineage += [base.id for base in classes[each].bases if isinstance(base, ast.Name) and base.id in classes]
            for field, below in itertools.pairwise(classes[each].body):
                if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                    continue
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    found.setdefault((name, field.target.id), " ".join(str(below.value.value).split()))
    return found


def _kind(field: dict[str, Any]) -> str:
    """The type of a field of a JSON Schema, in words."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(map(_kind, field["anyOf"]))
    if "const" in field or "enum" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"array of {_kind(field['items'])}" if field.get("items") else "array"
    values = field.get("additionalProperties")
    return f"object of {_kind(values)}" if isinstance(values, dict) else str(field.get("type", "any"))
