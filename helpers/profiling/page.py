"""A diagnosis as HTML: a fragment for notebooks, and a page with a step's timeline.

Neither needs scripts or the network. Whatever a profile names is escaped.
"""

from collections.abc import Iterator
from html import escape

from .comparison import Comparison, rows
from .diagnosis import LEAST, SHOWN, Diagnosis, Finding, divided, idle_reasons, milliseconds, recorded
from .step_picture import COLOURS, colour_of, picture
from .trace import Trace

_FAINT = "opacity:.75"


def fragment(diagnosis: Diagnosis) -> str:
    """The diagnosis for a notebook: styles are inline, text has the surrounding colour, so any theme can show it."""
    parts = (_head(diagnosis), _account(diagnosis), _warnings(diagnosis), _findings(diagnosis), _notes(diagnosis))
    return f'<div style="max-width:60em;line-height:1.45">{"".join(parts)}</div>'


def page(diagnosis: Diagnosis, trace: Trace) -> str:
    """One HTML file: the account as a bar, the last step as a timeline with the findings marked, the findings."""
    parts = (_head(diagnosis), _about(diagnosis, trace), _account(diagnosis), picture(diagnosis, trace))
    return _document(
        diagnosis.verdict, "".join((*parts, _warnings(diagnosis), _findings(diagnosis), _notes(diagnosis)))
    )


def comparison_fragment(comparison: Comparison) -> str:
    """Both steps as bars on one scale, in ms a step; what is gone, left and new."""
    longest = max(comparison.before.step_ms, comparison.after.step_ms)
    bars = "".join(
        f'<div style="{_FAINT}">{name}: {milliseconds(one.step_ms)}</div>'
        f'<div style="width:{100 * one.step_ms / longest if longest else 0:.2f}%">{_bar(one.parts)}</div>'
        for name, one in (("before", comparison.before), ("after", comparison.after))
    )
    right = 'style="text-align:right"'
    figures = "".join(
        f"{_swatch(name)}<span>{escape(name)}</span><span {right}>{before}</span><span {right}>{after}</span>"
        f"<span {right}>{change}</span>"
        for name, before, after, change in rows(comparison)
    )
    heads = "".join(f"<b {right}>{name}</b>" for name in ("before", "after", "change"))
    grid = "display:grid;grid-template-columns:1em max-content repeat(3,max-content);gap:.1em 1.2em;margin:.6em 0"
    lists = "".join(
        f"<div><b>{name}</b>: {escape(finding.finding)}: {escape(finding.gain)}</div>"
        for name in ("gone", "left", "new")
        for finding in getattr(comparison, name)
    )
    return (
        f'<div style="max-width:60em;line-height:1.45"><p><b>{escape(comparison.verdict)}</b></p>{bars}'
        f'<div style="{grid}"><span></span><b>ms a step</b>{heads}{figures}</div>{lists}</div>'
    )


def comparison_page(comparison: Comparison) -> str:
    return _document(comparison.verdict, comparison_fragment(comparison))


def _document(title: str, body: str) -> str:
    # The policy forbids every script and every request, should markup ever get past the escaping.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    html = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76em; margin: 2em auto;
  padding: 0 1em; }}
@media (prefers-color-scheme: dark) {{ body {{ color: #e4e4e4; background: #161616; }} }}
</style>
</head>
<body>
{body}
</body>
</html>
"""
    return html.encode("utf-8", "replace").decode()  # names in a trace may hold halves of characters


def _head(diagnosis: Diagnosis) -> str:
    return (
        f'<p style="font-size:1.25em;margin:.2em 0"><b>{escape(diagnosis.verdict)}</b></p>'
        f'<p style="{_FAINT};margin:.2em 0">{escape(recorded(diagnosis))}</p>'
    )


def _about(diagnosis: Diagnosis, trace: Trace) -> str:
    devices = trace.about.get("deviceProperties") or []
    names = [str(device.get("name", "")) for device in devices if isinstance(device, dict)]
    said = [str(diagnosis.source)] * (diagnosis.source is not None) + list(dict.fromkeys(filter(None, names)))
    return f'<p style="{_FAINT};margin:.2em 0">{escape("; ".join(said))}</p>' if said else ""


def _account(diagnosis: Diagnosis) -> str:
    """The parts as one bar, the reasons of idle time under the idle part, and a legend of both."""
    parts = diagnosis.parts
    if not parts:
        return ""
    reasons = idle_reasons(diagnosis) if "idle" in parts else {}
    below = ""
    if reasons:
        before = sum(share for name, share in list(parts.items())[: list(parts).index("idle")])
        place = f"margin-left:{100 * before:.2f}%;width:{100 * parts['idle']:.2f}%"
        below = f'<div style="{place}">{_bar(reasons, "1.1em")}</div>'
    legend = _legend(parts) + (f"<div>idle: {_legend(reasons)}</div>" if reasons else "")
    return f'<div style="margin:1em 0">{_bar(parts)}{below}<div style="margin-top:.4em">{legend}</div></div>'


def _bar(shares: dict[str, float], height: str = "1.7em") -> str:
    total = sum(shares.values()) or 1.0
    segments = []
    for name, share in shares.items():
        background, ink = COLOURS.get(name, (colour_of(name), "#000"))
        label = escape(name) if share / total > 0.012 * len(name) + 0.02 else ""
        style = (
            f"width:{100 * share / total:.3f}%;background:{background};color:{ink};overflow:hidden;white-space:nowrap;"
            f"height:{height};line-height:{height};text-align:center;font-size:.85em"
        )
        segments.append(f'<div title="{escape(name)}: {share:.1%}" style="{style}">{label}</div>')
    return f'<div style="display:flex;gap:1px">{"".join(segments)}</div>'


def _legend(shares: dict[str, float]) -> str:
    thousandths = divided(shares.values(), round(1000 * sum(shares.values())))
    return "".join(
        f'<span style="margin-right:1.4em;white-space:nowrap">{_swatch(name)} {escape(name)} '
        f"<b>{part / 10:.1f}%</b></span> "
        for name, part in zip(shares, thousandths, strict=True)
        if part
    )


def _swatch(name: str) -> str:
    background = COLOURS.get(name, (colour_of(name), ""))[0] if name != "step" else "transparent"
    return f'<span style="display:inline-block;width:.8em;height:.8em;background:{background}"></span>'


def _findings(diagnosis: Diagnosis) -> str:
    if not diagnosis.findings:
        return f"<p>No finding could bring {LEAST:.0%} or more.</p>"
    return "".join(_finding(number, finding) for number, finding in enumerate(diagnosis.findings[:SHOWN], 1))


def _finding(number: int, finding: Finding) -> str:
    width = 100 * min(max(finding.gain_share, 0.0), 1.0)
    gauge = (
        '<div style="height:.35em;margin:.25em 0;background:rgba(128,128,128,.25)">'
        f'<div style="height:100%;width:{width:.2f}%;background:{colour_of(finding.part)}"></div></div>'
    )
    lines = "".join(_row(name, text) for name, text in _fields(finding) if text)
    return (
        '<div style="margin:.9em 0;padding:.1em 0 .1em .9em;border-left:4px solid '
        f'{colour_of(finding.part)}"><div><b>{number}. {escape(finding.finding)}</b>: {escape(finding.gain)}</div>'
        f"{gauge}{lines}</div>"
    )


def _fields(finding: Finding) -> Iterator[tuple[str, str]]:
    code = f'<code style="background:none;color:inherit">{escape(finding.where)}</code>' if finding.where else ""
    yield from (("where", code), ("evidence", escape(finding.evidence)), ("advice", escape(finding.advice)))


def _row(name: str, html: str) -> str:
    return (
        f'<div style="display:flex"><span style="{_FAINT};flex:0 0 5.5em">{name}</span>'
        f'<span style="overflow-wrap:anywhere;min-width:0">{html}</span></div>'
    )


def _warnings(diagnosis: Diagnosis) -> str:
    """Why the profile may mislead, before what it seems to say."""
    lines = "".join(f'<div style="margin:.2em 0">⚠ {escape(warning)}</div>' for warning in diagnosis.warnings)
    return f'<div style="margin:.9em 0">{lines}</div>' if lines else ""


def _notes(diagnosis: Diagnosis) -> str:
    items = "".join(f'<li style="margin:.2em 0">{escape(note)}</li>' for note in diagnosis.remarks)
    return f'<ul style="{_FAINT};padding-left:1.2em">{items}</ul>' if items else ""
