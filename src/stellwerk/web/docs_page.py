"""`/docs`: the OpenAPI document as one page for people. No script, no font, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import msgspec

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8885; border-radius: .25rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8885; padding-top: 1rem; }
h2 code { font-size: 1.1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8883; }
nav ul { columns: 2; padding-left: 1.2rem; }
"""

_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def docs_page(document: Mapping[str, Any]) -> str:
    """The page."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}: the API")
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
        f"<p>{_prose(info['description'])} The same as OpenAPI: <code>/openapi.json</code>.</p><nav><ul>",
        *(
            f'<li><a href="#{operation["operationId"]}"><code>{method.upper()} {escape(path)}</code></a></li>'
            for path, method, operation in operations
        ),
        "</ul></nav>",
    ]
    for path, method, operation in operations:
        parts.extend(_operation(path, method, operation))
    parts.append("<h2>Types</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h3 id="type-{escape(name)}"><code>{escape(name)}</code></h3>{_schema(schema)}')
    parts.append("</body></html>")
    return "".join(parts)


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f'<h2 id="{operation["operationId"]}"><code>{method.upper()} {escape(path)}</code></h2>'
    yield f"<p>{_prose(operation['summary'])} {_prose(operation['description'])}</p>"
    if operation["parameters"]:
        yield "<table><tr><th>Parameter</th><th>In</th><th>Meaning</th></tr>"
        for param in operation["parameters"]:
            name = escape(param["name"]) + (" *" if param.get("required") else "")
            about = _prose(param.get("description", ""))
            limits = _limits(param["schema"])
            yield f"<tr><td><code>{name}</code></td><td>{param['in']}</td><td>{about} {limits}</td></tr>"
        yield "</table>"
    if "requestBody" in operation:
        yield f"<h3>Body</h3>{_schema(operation['requestBody']['content']['application/json']['schema'])}"
    yield "<h3>Answers</h3><table>"
    for status, answer in operation["responses"].items():
        names = ", ".join(_name(media["schema"]) for media in answer["content"].values())
        yield f"<tr><td><code>{status}</code></td><td>{_prose(answer['description'])}</td><td>{names}</td></tr>"
    yield "</table>"


def _schema(schema: Mapping[str, Any]) -> str:
    if "properties" not in schema:
        name = _name(schema)
        return f"<p>{name}</p>" if name else f"<pre>{escape(_pretty(schema))}</pre>"
    rows = [f"<p>{_prose(schema.get('description', ''))}</p><table>"]
    required = schema.get("required", ())
    for field, inner in schema["properties"].items():
        mark = " *" if field in required else ""
        kind = _name(inner) or f"<code>{escape(_pretty(inner, indent=0))}</code>"
        rows.append(f"<tr><td><code>{escape(field)}{mark}</code></td><td>{kind}</td></tr>")
    rows.append("</table>")
    return "".join(rows)


def _name(schema: Mapping[str, Any]) -> str:
    """Links to the types that a schema refers to; empty if it refers to none."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}"><code>{name}</code></a>'
    if "anyOf" in schema:
        names = [_name(inner) for inner in schema["anyOf"]]
        return " or ".join(names) if all(names) else ""
    if schema.get("type") == "array" and "items" in schema:
        inner = _name(schema["items"])
        return f"array of {inner}" if inner else ""
    return ""


def _limits(schema: Mapping[str, Any]) -> str:
    told = {key: value for key, value in schema.items() if key != "type"}
    return f"<code>{escape(_pretty(told, indent=0))}</code>" if told else ""


def _pretty(value: Any, indent: int = 2) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()


def _prose(text: str) -> str:
    """Escaped, with `code` in backticks."""
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if place % 2 else piece for place, piece in enumerate(pieces))
