"""A diagnosis as an HTML page with a step's timeline, without scripts or network; what a profile names is escaped."""

from html import escape

from .diagnosis import LEAST, MOST_FINDINGS, Diagnosis, Finding, divided, idle_reasons, recorded
from .step_picture import colours_of, picture
from .trace import Trace

_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
# The policy forbids every script and every request, should markup ever get past the escaping.
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76em; margin: 2em auto;
  padding: 0 1em; }
@media (prefers-color-scheme: dark) { body { color: #e4e4e4; background: #161616; } }
p { margin: .2em 0; }
.verdict { font-size: 1.25em; font-weight: bold; }
.faint, dt, ul { opacity: .75; }
.account, .finding, .warnings { margin: .9em 0; }
.bar { display: flex; gap: 1px; }
.bar div { overflow: hidden; white-space: nowrap; height: 1.7em; text-align: center; font-size: .85em; }
.part { margin-right: 1.4em; white-space: nowrap; }
.swatch { display: inline-block; width: .8em; height: .8em; }
.finding { padding-left: .9em; border-left: 4px solid; }
.gauge { height: .35em; margin: .25em 0; background: rgba(128, 128, 128, .25); }
.gauge div { height: 100%; }
dl { display: grid; grid-template-columns: 5.5em 1fr; margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; }
</style>
"""


def page(diagnosis: Diagnosis, trace: Trace) -> str:
    """One HTML file: the account as a bar, the last step as a timeline with the findings marked, the findings."""
    devices = trace.about.get("deviceProperties") or []
    names = [str(device.get("name", "")) for device in devices if isinstance(device, dict)]
    about = "; ".join(filter(None, [str(diagnosis.source or ""), *dict.fromkeys(names)]))
    warnings = "".join(f"<p>⚠ {escape(warning.text)}</p>" for warning in diagnosis.warnings)
    findings = [_finding(number, each) for number, each in enumerate(diagnosis.findings[:MOST_FINDINGS], 1)]
    notes = "".join(f"<li>{escape(note)}</li>" for note in diagnosis.remarks)
    html = (
        f"{_HEAD}<title>{escape(diagnosis.verdict)}</title>\n</head>\n<body>\n"
        f'<p class="verdict">{escape(diagnosis.verdict)}</p>'
        f'<p class="faint">{escape(recorded(diagnosis))}</p><p class="faint">{escape(about)}</p>'
        f'{_account(diagnosis)}{picture(diagnosis, trace)}<div class="warnings">{warnings}</div>'
        f"{''.join(findings) or f'<p>No finding could bring {LEAST:.0%} or more.</p>'}"
        f"<ul>{notes}</ul>\n</body>\n</html>\n"
    )
    # Names in a trace may hold control characters, and halves of others.
    return html.translate(_CONTROLS).encode("utf-8", "replace").decode()


def _account(diagnosis: Diagnosis) -> str:
    """The parts as one bar, the reasons of idle time under the idle part, and a legend of both."""
    parts, reasons = diagnosis.parts, idle_reasons(diagnosis)
    if not parts:
        return ""
    bars, legends = _bar(parts), _legend(parts)
    if "idle" in parts and reasons:
        before = sum(share for name, share in list(parts.items())[: list(parts).index("idle")])
        place = f"margin-left:{100 * before:.2f}%;width:{100 * parts['idle']:.2f}%"
        bars += f'<div style="{place}">{_bar(reasons)}</div>'
        legends += f"<div>idle: {_legend(reasons)}</div>"
    return f'<div class="account">{bars}{legends}</div>'


def _bar(shares: dict[str, float]) -> str:
    total = sum(shares.values()) or 1.0
    segments = []
    for name, share in shares.items():
        label = escape(name) if share / total > 0.012 * len(name) + 0.02 else ""
        colour, ink = colours_of(name)
        style = f"width:{100 * share / total:.3f}%;background:{colour};color:{ink}"
        segments.append(f'<div title="{escape(name)}: {share:.1%}" style="{style}">{label}</div>')
    return f'<div class="bar">{"".join(segments)}</div>'


def _legend(shares: dict[str, float]) -> str:
    thousandths = divided(shares.values(), round(1000 * sum(shares.values())))
    return "".join(
        f'<span class="part"><span class="swatch" style="background:{colours_of(name)[0]}"></span> {escape(name)} '
        f"<b>{part / 10:.1f}%</b></span> "
        for name, part in zip(shares, thousandths, strict=True)
        if part
    )


def _finding(number: int, finding: Finding) -> str:
    colour, width = colours_of(finding.part)[0], 100 * min(max(finding.gain_share, 0.0), 1.0)
    fields = {"where": finding.where, "evidence": finding.evidence, "advice": finding.advice}
    lines = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in fields.items() if text)
    return (
        f'<div class="finding" style="border-color:{colour}"><b>{number}. {escape(finding.finding)}</b>: '
        f'{escape(finding.gain)}<div class="gauge"><div style="width:{width:.2f}%;background:{colour}"></div></div>'
        f"<dl>{lines}</dl></div>"
    )
