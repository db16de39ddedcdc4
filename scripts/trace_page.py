"""A trace as one HTML page that needs nothing else: the answer by kind of token, and every round's tree and reasons."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from spec_jax.engine.trace import Node, Round, Step, as_dict

Texts = Callable[[int], str]

_MARKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_SIGNS = {
    "accepted": "✓",
    "correction": "→",
    "bonus": "+",
    "rejected": "✗",
    "unreached": "○",
    "cut": "✂",
    "trimmed": "⊣",
    "root": "⚓",
}
_MEANING = {
    "accepted": "drafted, and accepted",
    "correction": "the target's choice where no drafted token was accepted",
    "bonus": "the target's choice behind the end of the accepted draft",
    "rejected": "drafted behind an accepted token, and refused",
    "unreached": "drafted behind a token that was not accepted",
    "cut": "drafted but not verified: beyond the width that the controller chose",
    "trimmed": "accepted, but behind the end of the text",
    "root": "the anchor: the last token before the round",
}
_CONTEXT = 160


def token_texts(tokenizer: Any) -> Texts:
    """The text of a token alone: decoded, or as the vocabulary spells it if it is no text by itself, or its id."""

    def text(token: int) -> str:
        if tokenizer is None:
            return f"<{token}>"
        alone = tokenizer.decode([token])
        if alone and "\ufffd" not in alone:
            return alone
        return tokenizer.backend.id_to_token(token) or f"<{token}>"

    return text


def render(
    rounds: Sequence[Round], texts: Texts, summary: Mapping[str, Any], prompt: str, title: str = "Decoding, traced"
) -> str:
    """The page.

    Args:
        rounds: the trace.
        texts: the text of a token alone.
        summary: name -> value, shown in order; a mapping as value becomes a table of its own.
        prompt: the prompt's text, or its end.
        title: heading of the page.
    """
    answer, chips, behind = [], [], prompt
    for number, r in enumerate(rounds, 1):
        for step in r.steps:
            if step.kept:
                note = f"round {number}: {_MEANING[step.kind]}, p {step.probability:.3f}"
                piece = visible(texts(step.token), breaks=True)
                answer.append(f'<a class="e {step.kind}" href="#r{number}" title="{escape(note)}">{piece}</a>')
        chips.append(_round(number, r, texts, behind))
        behind = (behind + "".join(texts(t) for t in r.kept))[-_CONTEXT:]
    data = json.dumps({"summary": _plain(summary), "rounds": [as_dict(r) for r in rounds]}, allow_nan=False)
    parts = {
        "title": escape(title),
        "style": _STYLE,
        "summary": _summary(rounds, summary),
        "legend": "".join(
            f'<li><span class="n {k}"><b aria-hidden="true">{_SIGNS[k]}</b> {k}</span> {escape(_MEANING[k])}</li>'
            for k in _SIGNS
        ),
        "bars": _bars(rounds),
        "answer": "".join(answer),
        "rounds": "\n".join(chips),
        "data": data.replace("<", "\\u003c"),
        "script": _SCRIPT,
    }
    page, out = _PAGE, []
    for name, part in parts.items():  # in the template's order, so that no part is searched for the next mark
        before, page = page.split(f"@{name}@", 1)
        out += [before, part]
    return "".join([*out, page])


def visible(text: str, breaks: bool = False) -> str:
    """Escaped text whose white space and control characters show; with `breaks` a line break also breaks the line."""
    out = []
    for char in text:
        if char in _MARKS:
            out.append(f'<i class="w">{_MARKS[char]}</i>' + ("\n" if breaks and char == "\n" else ""))
        elif unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"):
            out.append(f'<i class="w">U+{ord(char):04X}</i>')
        else:
            out.append(escape(char))
    return "".join(out)


def _plain(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _plain(v) if isinstance(v, Mapping) else v for k, v in summary.items()}


def _summary(rounds: Sequence[Round], summary: Mapping[str, Any]) -> str:
    tokens = sum(len(r.kept) for r in rounds)
    facts: dict[str, Any] = {
        "acceptance length": f"{tokens / max(1, len(rounds)):.2f} tokens a target pass",
        "rounds": len(rounds),
        "tokens": tokens,
        "finish": rounds[-1].finish if rounds else "none",
        **summary,
    }
    show = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v)  # noqa: E731
    item = lambda k, v: f"<div><dt>{escape(str(k))}</dt><dd>{escape(show(v))}</dd></div>"  # noqa: E731
    flat = "".join(item(k, v) for k, v in facts.items() if not isinstance(v, Mapping))
    tables = "".join(
        f"<details><summary>{escape(str(k))}</summary><dl>{''.join(item(*pair) for pair in v.items())}</dl></details>"
        for k, v in facts.items()
        if isinstance(v, Mapping)
    )
    return f"<dl>{flat}</dl>{tables}"


def _bars(rounds: Sequence[Round]) -> str:
    """Tokens by round, as a row of bars that lead to the rounds."""
    most = max((len(r.kept) for r in rounds), default=1) or 1
    height = lambda r: 40 * len(r.kept) / most  # noqa: E731
    bars = "".join(
        f'<a href="#r{i + 1}"><title>round {i + 1}: {len(r.kept)} tokens of {r.width} nodes</title>'
        f'<rect x="{i * 8}" y="{40 - height(r):.1f}" width="7" height="{height(r):.1f}"/></a>'
        for i, r in enumerate(rounds)
    )
    size = f'width="{len(rounds) * 8}" height="40" viewBox="0 0 {max(1, len(rounds) * 8)} 40"'
    label = f"tokens emitted by each of {len(rounds)} rounds, at most {most}"
    return f'<div class="scroll"><svg role="img" aria-label="{label}" {size}>{bars}</svg></div>'


def _round(number: int, r: Round, texts: Texts, behind: str) -> str:
    emitted = "".join(f'<span class="n {s.kind}">{visible(texts(s.token))}</span>' for s in r.steps if s.kept)
    accepted = sum(s.kind == "accepted" and s.kept for s in r.steps)
    counts = f"{len(r.nodes) - 1} drafted, width {r.width}, {accepted} accepted"
    ended = "" if r.finish == "running" else f" The text ends here: {escape(r.finish)}."
    steps = "".join(_step(s, r.nodes, texts) for s in r.steps)
    return (
        f'<details class="round" id="r{number}"><summary><b>{number}</b> <small>{counts}</small> {emitted}</summary>'
        f'<p class="t"><small>text so far, to position {r.position}:</small> …{visible(behind)}</p>'
        f'<div class="scroll tree">{_branch(0, r.nodes, texts)}</div>'
        f'<div class="scroll"><table><thead><tr><th scope="col">behind</th><th scope="col">emitted</th>'
        f'<th scope="col">p</th><th scope="col">drafter\'s confidence</th><th scope="col">target\'s choice</th>'
        f'<th scope="col">outcome</th></tr></thead><tbody>{steps}</tbody></table></div>'
        f"<p><small>Width {r.width}.{ended}</small></p></details>"
    )


def _step(step: Step, nodes: Sequence[Node], texts: Texts) -> str:
    children = [n for n in nodes if n.parent == step.node and n.fate != "cut"]
    drafted = [n for n in children if n.fate in ("accepted", "trimmed")]
    confidence = f"{drafted[0].confidence:.2f}" if drafted and step.kind == "accepted" else "not drafted"
    own = "the same" if step.choice == step.token else f"{_spell(step.choice, texts)} {step.choice_probability:.3f}"
    refused = [n for n in children if n.fate == "rejected"]
    why = _SIGNS[step.kind] + " " + step.kind
    if refused:
        some = ", ".join(f"{_spell(n.token, texts)} {n.confidence:.2f}" for n in refused[:6])
        why += f"; refused: {some}{' …' if len(refused) > 6 else ''}"
    if not step.kept:
        why += "; behind the end of the text"
    cells = (
        _spell(nodes[step.node].token, texts),
        _spell(step.token, texts),
        f"{step.probability:.3f}",
        confidence,
        own,
    )
    return f'<tr class="{step.kind}">' + "".join(f"<td>{c}</td>" for c in cells) + f"<td>{why}</td></tr>"


def _spell(token: int, texts: Texts) -> str:
    return f"<code>{visible(texts(token))}</code>" if token >= 0 else "none (invalid logits)"


def _branch(at: int, nodes: Sequence[Node], texts: Texts) -> str:
    """A node and what hangs on it: only children in a row, several as a list. Drawn from the leaves up."""
    below = [""] * len(nodes)
    children: list[list[int]] = [[] for _ in nodes]
    for i, n in enumerate(nodes):
        if n.parent >= 0:
            children[n.parent].append(i)
    for i in reversed(range(len(nodes))):
        n = nodes[i]
        share = "" if n.fate == "root" else f" <small>{n.confidence:.2f}</small>"
        note = f"{_MEANING[n.fate]}; confidence {n.confidence:.3f}"
        chip = (
            f'<span class="n {n.fate}" title="{escape(note)}"><b aria-hidden="true">{_SIGNS[n.fate]}</b>'
            f'<span class="vh">{n.fate}: </span>{visible(texts(n.token))}{share}</span>'
        )
        if len(children[i]) == 1:
            below[i] = chip + below[children[i][0]]
        else:
            items = "".join(f"<li>{below[c]}</li>" for c in children[i])
            below[i] = chip + (f"<ul>{items}</ul>" if items else "")
    return below[at]


_STYLE = """
:root{color-scheme:light dark;--ok:#c8efd2;--fix:#ffdfb0;--more:#cfe0ff;--no:#f8cfcf;--off:#e6e6e6;--ink:#1a1a1a;
--soft:#5a5a5a;--line:#c9c9c9;--page:#fff}
@media (prefers-color-scheme:dark){:root{--ok:#1d4d2b;--fix:#5e3f10;--more:#23406f;--no:#5e2323;--off:#333;--ink:#eee;
--soft:#b0b0b0;--line:#4a4a4a;--page:#151515}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:70rem;margin:0 auto;
padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
small,dt{color:var(--soft)}
dl{display:flex;flex-wrap:wrap;gap:.3rem 1.6rem;margin:.5rem 0}dd{margin:0;font-weight:600}
ul{margin:.15rem 0 .15rem .4rem;padding-left:.8rem;border-left:1px solid var(--line);list-style:none}
.legend{border:0;padding:0;margin:0}
.n,.e{border-radius:.25rem;color:inherit;text-decoration:none}
.n{display:inline-block;padding:0 .3rem;margin:.1rem .15rem .1rem 0;white-space:pre-wrap;max-width:100%}
.accepted,.trimmed{background:var(--ok)}.correction{background:var(--fix)}.bonus{background:var(--more)}
.rejected{background:var(--no);text-decoration:line-through;text-decoration-thickness:1px}
.unreached,.cut,.root{background:var(--off)}.trimmed,.cut{outline:1px dashed var(--soft)}
tr.accepted,tr.correction,tr.bonus{background:none}
.answer{white-space:pre-wrap;border:1px solid var(--line);border-radius:.4rem;padding:.8rem;line-height:1.7}
.e.correction{border-bottom:2px solid}.e.bonus{border-bottom:2px dotted}
.e:focus,.e:hover{outline:2px solid}
.w{color:var(--soft);font-style:normal;font-size:.85em}
.round{border-top:1px solid var(--line);padding:.3rem 0}.round[open]{padding-bottom:1rem}
.round:target>summary{outline:2px solid}
summary{cursor:pointer}
.t{white-space:pre-wrap;margin:.5rem 0}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.9rem;margin:.5rem 0}th,td{text-align:left;padding:.15rem .6rem;
border-bottom:1px solid var(--line);vertical-align:top}
svg rect{fill:currentColor;opacity:.55}svg a:hover rect,svg a:focus rect{opacity:1}
.vh{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
"""

_SCRIPT = """
const open=()=>{const r=document.getElementById(location.hash.slice(1));if(r&&r.tagName==='DETAILS')r.open=true};
addEventListener('hashchange',open);open();
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>@title@</title>
<style>@style@</style>
</head>
<body>
<h1>Decoding, round by round</h1>
@summary@
<details><summary>what the colours and signs mean</summary><ul class="legend">@legend@</ul></details>
<h2>Tokens by round</h2>
@bars@
<h2>Answer</h2>
<p><small>A token leads to the round that emitted it.</small></p>
<div class="answer">@answer@</div>
<h2>Rounds</h2>
@rounds@
<script type="application/json" id="trace">@data@</script>
<script>@script@</script>
</body>
</html>
"""
