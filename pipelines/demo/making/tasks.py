"""Cut chat tasks out of a source file: what a user asks, what the file answers.

A task is a dict `{"tag", "turns", "thought"}`; a turn is `{"ask", "subject", "fenced", "answer"}`. The user's
message is one of the phrases of `ask` around the subject (phrases.py), so that the same question can be asked
in several lengths. `thought` is a short templated thought for the last turn, or the empty string.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections.abc import Iterator

SHORT, LONG = 60, 650  # characters of an answer: about 20 to 200 tokens
DIRECTIVE = re.compile(
    r"^( *)\.\. (function|method|class|classmethod|staticmethod|attribute|data|exception|decorator|describe"
    r"|opcode|c:function|c:type|c:macro|c:var|c:member|option|envvar|module|pdbcommand|2to3fixer)::[ ]*(.+)$"
)
HEADING = re.compile(r"^([=\-~^*\"'])\1{3,}$")


def turn(ask: str, subject: str, answer: str, fenced: bool = False, wrap: bool = False) -> dict:
    """One turn; a fenced question about code gets its code back in a fence."""
    answer = f"```python\n{answer}\n```" if fenced and wrap else answer
    return {"ask": ask, "subject": subject, "fenced": fenced, "answer": answer}


def fits(answer: str) -> bool:
    """Whether an answer is neither trivial nor too long."""
    return SHORT <= len(answer) <= LONG


def listing(words: list[str]) -> str:
    """`a`, `b` and `c`."""
    quoted = [f"`{word}`" for word in words]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1]


def think_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A thought about a function, derived from its syntax tree."""
    names = [
        a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")
    ]
    said = f"The function `{node.name}` takes {listing(names[:5])}." if names else f"`{node.name}` takes no arguments."
    called = {
        n.func.id if isinstance(n.func, ast.Name) else n.func.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name | ast.Attribute)
    }
    if called:
        said += f" It calls {listing(sorted(called)[:4])}."
    returns = any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(node))
    raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
    return said + (" It returns a value." if returns else " It returns nothing.") + (" It can raise." if raises else "")


def tidy_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A docstring without its later sections when those make it too long."""
    text = (ast.get_docstring(node) or "").strip()
    while len(text) > LONG and "\n\n" in text:
        text = text.rpartition("\n\n")[0]
    return text


def function_tasks(text: str, rng: random.Random) -> Iterator[dict]:
    """`complete` and `docstring` tasks of a module's functions."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in nodes:
        last = node.end_lineno or node.lineno
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        body = [n for n in node.body if n.lineno > node.lineno]
        if not body or last - first < 4:
            continue
        documented = ast.get_docstring(node) is not None
        cut = body[0].end_lineno if documented else body[0].lineno - 1 + rng.randrange(0, 1 + (last - first) // 3)
        if cut is None or cut >= last:
            continue
        head = textwrap.dedent("\n".join(lines[first:cut]))
        indent = len(lines[first]) - len(lines[first].lstrip())
        tail = "\n".join(line[indent:] for line in lines[cut:last]).strip("\n")
        bare = "\n".join(lines[first : body[0].lineno - 1] + lines[cut:last]) if documented else ""
        docstring, thought = tidy_docstring(node), think_function(node)
        fenced = rng.random() < 0.5
        if fits(tail) and len(head) <= LONG and not tail.startswith(("\n", ")")):
            turns = [turn("complete", head, tail, fenced, wrap=True)]
            yield {"tag": "complete", "turns": turns, "thought": thought}
        if documented and fits(docstring):
            bare = textwrap.dedent(bare)
            if len(bare) <= LONG + 150:
                turns = [turn("docstring", bare, docstring, rng.random() < 0.5)]
                yield {"tag": "docstring", "turns": turns, "thought": thought}
            signature = "\n".join(line[indent:] for line in lines[first : body[0].lineno - 1])
            if fits(tail) and len(signature) <= LONG:
                turns = [
                    turn("complete", signature, tail, fenced, wrap=True),
                    turn("now docstring", "", docstring),
                ]
                yield {"tag": "complete", "turns": turns, "thought": thought}


def stop_line(lines: list[str], start: int) -> int | None:
    """Where code that begins at `start` may stop: at a blank line before a line indented no deeper."""
    floor = len(lines[start]) - len(lines[start].lstrip())
    for at in range(start + 5, min(start + 30, len(lines) - 1)):
        after = next((line for line in lines[at:] if line.strip()), "")
        if not lines[at].strip() and len(after) - len(after.lstrip()) <= floor:
            return at
    return None


def continue_tasks(text: str, rng: random.Random) -> Iterator[dict]:
    """`continue` tasks: some lines and those up to the next natural stop, sometimes the part after it too."""
    lines = text.split("\n")
    at = rng.randrange(0, 12)
    while at + 12 < len(lines):
        asked = rng.randrange(6, 18)
        begin = at + asked
        at = begin
        while begin < len(lines) and not lines[begin].strip():
            begin += 1
        stop = stop_line(lines, begin) if begin < len(lines) else None
        if stop is None:
            continue
        base = min((len(v) - len(v.lstrip()) for v in lines[begin - asked : stop] if v.strip()), default=0)
        subject = "\n".join(v[base:] for v in lines[begin - asked : begin]).strip("\n")
        answer = "\n".join(v[base:] for v in lines[begin:stop]).strip("\n")
        if not (fits(answer) and SHORT <= len(subject) <= LONG):
            continue
        fenced = rng.random() < 0.5
        turns = [turn("continue", subject, answer, fenced, wrap=True)]
        words = sorted(set(re.findall(r"\b(?:def|class) (\w+)", subject)))[:4]
        thought = f"The code so far defines {listing(words)}." if words else "These lines are the middle of a block."
        thought += f" The last line is `{lines[begin - 1].strip() or lines[begin - 2].strip()}`."
        after = stop + 1
        while after < len(lines) and not lines[after].strip():
            after += 1
        second = stop_line(lines, after) if rng.random() < 0.3 and after < len(lines) else None
        if second is not None:
            more = "\n".join(v[base:] for v in lines[after:second]).strip("\n")
            if fits(more):
                turns.append(turn("more", "", f"```python\n{more}\n```" if fenced else more))
        yield {"tag": "continue", "turns": turns, "thought": thought}
        at = stop


def entries(text: str) -> Iterator[tuple[str, str, str]]:
    """The documented things of a page: a name, its kind, and the first paragraphs said about it."""
    lines = text.split("\n")
    module = ""
    for at, line in enumerate(lines):
        found = DIRECTIVE.match(line)
        if found:
            indent, kind, what = len(found[1]), found[2], found[3].rstrip(" \\")
            if kind.startswith("c:"):  # `PyObject *PyList_New(Py_ssize_t len)`: the last word before the parenthesis
                what = re.split(r"[\s*]+", what.split("(")[0].strip())[-1]
            name = re.split(r"[(\s]", what.strip())[0]
            if kind == "module":
                module = name
            if kind in ("function", "class", "data", "exception") and module and "." not in name:
                name = f"{module}.{name}"
            end = at + 1
            while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent):
                end += 1
            yield name, kind.removeprefix("c:"), "\n".join(v[indent:] for v in lines[at:end]).strip("\n")
        elif HEADING.match(line) and at and lines[at - 1].strip() and len(lines[at - 1]) <= len(line) + 2:
            end = next((i for i in range(at + 1, len(lines)) if HEADING.match(lines[i])), len(lines)) - 1
            yield f"“{lines[at - 1].strip()}”", "section", "\n".join(lines[at + 1 : end]).strip("\n")


def docs_tasks(text: str) -> Iterator[dict]:
    """`docs` tasks of one page; every third one asks for the next entry too."""
    found: list[tuple[str, str, str]] = []
    for name, kind, said in entries(text):
        while len(said) > LONG and "\n\n" in said:
            said = said.rpartition("\n\n")[0].rstrip()
        if fits(said) and len(name) <= 60:
            found.append((name, kind, said))
    for at, (name, kind, said) in enumerate(found):
        label = name if kind == "section" else f"`{name}`"
        turns, thought = [turn("docs", label, said)], f"The user asks about {label}. It is a {kind}."
        if at % 3 == 0 and at + 1 < len(found):
            other, other_kind, answer = found[at + 1]
            label = other if other_kind == "section" else f"`{other}`"
            turns.append(turn("now docs", label, answer))
            thought = f"Now the user asks about {label}. It is a {other_kind}."
        yield {"tag": "docs", "turns": turns, "thought": thought}


def make(path: str, kind: str, text: str, rng: random.Random) -> Iterator[dict]:
    """All chat tasks of one file."""
    if kind == "docs":
        yield from docs_tasks(text)
        return
    yield from function_tasks(text, rng)
    yield from continue_tasks(text, rng)
