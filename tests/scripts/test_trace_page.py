"""The page of a trace: whole, self-contained, and safe for whatever a token says."""

import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from scripts import trace_page
from spec_jax.engine.trace import Node, Round, Step, as_dict, from_dict

HOSTILE = {
    0: " plain",
    1: "</script><script>alert(1)</script>",
    2: "<img src=x onerror=alert(1)>",
    3: '" onmouseover="alert(1)',
    4: "a\n\tb\r\x1b[31m\x00",
    5: "\u202eevil\u200b\u2028",
    6: "@answer@ @data@ @style@",
    7: "&amp; <!-- \ud800",
    8: "]]> é 漢字 🙂",
}
ROUNDS = [
    Round(
        position=5,
        width=6,
        nodes=(
            Node(8, -1, 1.0, "root"),
            Node(0, 0, 0.9, "accepted"),
            Node(1, 0, 0.1, "rejected"),
            Node(2, 1, 0.5, "accepted"),
            Node(3, 2, 0.4, "unreached"),
            Node(4, 3, 0.2, "rejected"),
            Node(5, 4, 0.1, "cut"),
        ),
        steps=(
            Step(0, 0, 0, 0.9, 0.9, "accepted", True),
            Step(1, 2, 7, 0.4, 0.5, "accepted", True),
            Step(3, 6, 6, 0.25, 0.25, "correction", True),
        ),
        finish="running",
    ),
    Round(
        position=8,
        width=2,
        nodes=(Node(6, -1, 1.0, "root"), Node(1, 0, 0.7, "accepted")),
        steps=(
            Step(0, 1, 1, 0.99, 0.99, "accepted", True),
            Step(1, 3, 3, 0.6, 0.6, "bonus", True),
        ),
        finish="running",
    ),
    Round(
        position=10,
        width=2,
        nodes=(Node(3, -1, 1.0, "root"), Node(4, 0, 0.7, "accepted"), Node(5, 1, 0.7, "trimmed")),
        steps=(
            Step(0, 4, 4, 0.99, 0.99, "accepted", True),
            Step(1, 5, 5, 0.6, 0.6, "accepted", False),
            Step(2, 7, 7, 0.6, 0.6, "bonus", False),
        ),
        finish="eos",
    ),
]
SUMMARY = {"config": "<b>suffix</b>", "counters": {"rounds": 3, "depth_reached": [1, 2]}}
VOID = {"meta", "br", "img", "input", "link"}


class Reader(HTMLParser):
    """Checks that tags close in order, and collects what stands where."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.answer, self.script = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))
        if tag == "a" and dict(attrs).get("class", "").startswith("e "):
            self.answer.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if any(tag == "a" and attrs.get("class", "").startswith("e ") for tag, attrs in self.open):
            self.answer[-1][1] += data
        if self.open and self.open[-1][1].get("id") == "trace":
            self.script.append(data)


def page(rounds=ROUNDS):
    return trace_page.render(rounds, HOSTILE.__getitem__, SUMMARY, "the <prompt>")


def read(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_every_emitted_token_appears_once_in_the_answer():
    answer = read(page()).answer
    steps = [(number, s) for number, r in enumerate(ROUNDS, 1) for s in r.steps if s.kept]
    assert len(answer) == len(steps) == 6
    for (attrs, text), (number, step) in zip(answer, steps, strict=True):
        assert attrs["class"] == f"e {step.kind}" and attrs["href"] == f"#r{number}"
        shown = unescape(re.sub(r"<[^>]*>", "", trace_page.visible(HOSTILE[step.token])))
        assert text.replace("\n", "") == shown


def test_hostile_text_stays_text():
    html, known = page(), {"e", "n", "w", "vh", "t", "round", "scroll", "scroll tree", "answer", "legend"}
    reader = read(html)
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("script") == 2 and "img" not in tags and "b" in tags
    for tag, attrs in reader.tags:
        assert not any(name.startswith("on") for name in attrs)
        kind = attrs.get("class", "").split()[:1]
        assert not kind or attrs["class"] in known or kind[0] in {"e", "n", *trace_page._SIGNS}
        assert tag not in ("iframe", "object", "embed", "link", "base", "form")
    assert not set(html) & set("\x00\x1b\r\u202e\u200b\u2028\ud800")
    html.encode("utf-8")


def test_the_page_needs_nothing_else():
    html = page()
    assert not re.search(r"https?:|url\(|@import", html)
    assert not any({"src", "srcset", "action", "data"} & attrs.keys() for _, attrs in read(html).tags)
    assert all(attrs["href"].startswith("#r") for tag, attrs in read(html).tags if tag == "a")
    ids = [attrs["id"] for _, attrs in read(html).tags if "id" in attrs]
    assert ids == ["r1", "r2", "r3", "trace"]
    assert "prefers-color-scheme:dark" in html and 'lang="en"' in html and 'name="viewport"' in html


def test_the_script_is_a_fixed_one_whose_brackets_close():
    """No token is ever in it; what it is made of is plain enough to check without an engine that runs it."""
    reader, (script,) = read(page()), re.findall(r"<script>(.*?)</script>", page(), re.DOTALL)
    assert script == trace_page._SCRIPT and [attrs for tag, attrs in reader.tags if tag == "script"][-1] == {}
    assert balanced(script) and not balanced(script.replace("}", "", 1)) and not balanced(script.replace("'", "", 1))
    assert not re.search(r"innerHTML|eval|document\.write|fetch|import|XMLHttpRequest", script)


def balanced(script):
    """Whether brackets and quotes close in order; for code without comments, templates and regular expressions."""
    open_, quote = [], ""
    for char in script:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            open_.append(")]}"["([{".index(char)])
        elif char in ")]}" and (not open_ or open_.pop() != char):
            return False
    return not open_ and not quote


def test_the_records_are_in_the_page():
    data = json.loads("".join(read(page()).script))
    assert [from_dict(r) for r in data["rounds"]] == ROUNDS and data["summary"] == SUMMARY
    assert data["rounds"] == json.loads(json.dumps([as_dict(r) for r in ROUNDS]))


def test_every_node_is_drawn_once_with_its_fate():
    reader = read(page())
    drawn = [attrs for tag, attrs in reader.tags if tag == "span" and "confidence" in attrs.get("title", "")]
    assert [a["class"] for a in drawn].count("n cut") == 1 and [a["class"] for a in drawn].count("n trimmed") == 1
    assert len(drawn) == sum(len(r.nodes) for r in ROUNDS)


def test_summary_and_reasons():
    html = page()
    assert "2.00 tokens a target pass" in html and "&lt;b&gt;suffix&lt;/b&gt;" in html and "the<i" in html
    assert "The text ends here: eos." in html and "behind the end of the text" in html
    rows = re.findall(r"<tr class=.*?</tr>", html)
    assert len(rows) == 8 and sum("the same" in row for row in rows) == 7
    assert "→ correction; refused:" in rows[2] and "not drafted" in rows[2]


def test_a_deep_chain_and_a_text_of_nothing():
    n = 3000
    chain = tuple(Node(0, i - 1, 1.0, "accepted" if i else "root") for i in range(n))
    deep = Round(1, n, chain, (Step(0, 0, 0, 1.0, 1.0, "accepted", True),), "budget")
    assert page([deep]).count("<li>") < 20
    comb = tuple(
        Node(0, max(0, (i - 1) // 2 * 2 - 1 if i > 2 else 0), 1.0, "unreached" if i else "root") for i in range(n)
    )
    read(page([Round(1, n, comb, (), "budget")]))
    read(page([]))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" a", '<i class="w">·</i>a'),
        ("\n", '<i class="w">⏎</i>'),
        ("<&\"'", "&lt;&amp;&quot;&#x27;"),
        ("\u00a0", '<i class="w">U+00A0</i>'),
        ("·", "·"),
    ],
)
def test_white_space_shows(text, shown):
    assert trace_page.visible(text) == shown
    assert trace_page.visible("\n", breaks=True).endswith("\n")


def test_token_texts_without_a_text_are_spelled():
    class Tokenizer:
        class backend:  # noqa: N801
            id_to_token = staticmethod({1: "Ã", 2: "<|end|>"}.get)

        def decode(self, ids):
            return {0: " hi", 1: "\ufffd"}.get(ids[0], "")

    texts = trace_page.token_texts(Tokenizer())
    assert [texts(i) for i in range(4)] == [" hi", "Ã", "<|end|>", "<3>"]
    assert trace_page.token_texts(None)(5) == "<5>"
