"""What a visitor does with the page, and what is recorded of it."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Locator, Request

TIMEOUT_MS = 60_000
MINUS = "\N{MINUS SIGN}"
"""What the page writes before negative numbers."""

VIEWS = (
    "text", "choices", "steer", "sweep", "inside", "examples", "vectors", "models", "sessions",
)  # fmt: skip

DONE = {
    "text": "#view-text .result .token",
    "choices": "#view-choices .choice",
    "steer": "#view-steer .continuations[aria-busy=false] + .receipt",
    "sweep": "#view-sweep .explained",
    "inside": "#view-inside .heat td",
    "examples": "#view-examples .example mark",
    "vectors": "#view-vectors .vector .quality",
    "models": "#view-models .model",
    "sessions": "#view-sessions [role=status]",
}
"""View -> what is there once it shows an answer."""

SHOWN = {
    "examples": "examples?opened=stories",
    "vectors": "vectors?opened=mood",
}
"""View -> its address where something is to be seen, unless it is the view's name."""

_STORIES = [
    ("Lily walked to the park.", "She smiled and laughed.", "She sat down and cried."),
    ("Max looked out of the window.", "He smiled at the sunshine.", "He cried in the rain."),
    ("Mia went to the market.", "She found a lovely new toy.", "She lost her toy in the rain."),
    ("Tom went to the school.", "He felt happy and glad.", "He felt sad and lonely."),
    ("Rose took a bag to the market.", "Everybody was kind to her.", "Nobody was kind to her."),
    ("Sam went to the lake.", "It was a wonderful day.", "It was a terrible day."),
]
EXAMPLE = [
    {"positive": f"{begin} {happy} The end.", "negative": f"{begin} {sad} The end."}
    for begin, happy, sad in _STORIES
]
"""Contrast pairs for the vector `mood`."""

_WATCH = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy violated: ${event.violatedDirective} ${event.blockedURI}`));
"""
_DROP = """
(element, files) => {
  const dataTransfer = new DataTransfer();
  for (const [name, bytes] of files) {
    dataTransfer.items.add(new File([new Uint8Array(bytes)], name));
  }
  for (const type of ["dragover", "drop"]) {
    element.dispatchEvent(new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer }));
  }
}
"""


def download(button: Locator, path: Path) -> Path:
    """Press a button that saves a file; return where it is then."""
    with button.page.expect_download() as saved:
        button.click()
    saved.value.save_as(path)
    return path


class Visit:
    """A page in a browser of its own; `complaints` is what no visitor should get.

    That is: messages of errors in the console, errors of scripts, violations of the policy, and
    requests to other servers.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.complaints: list[str] = []
        self.requests: list[Request] = []
        self.page = context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.add_init_script(_WATCH)
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(f"script: {error}"))
        self.page.on("request", self._record)
        self._expected: list[str] = []

    @classmethod
    def start(
        cls,
        chromium: Browser,
        url: str,
        *,
        dark: bool = False,
        width: int = 1280,
        height: int = 900,
        **options: Any,
    ) -> "Visit":
        """Open an empty page of this size, in light or dark colours."""
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            **options,
        )
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        return cls(context, url)

    def _hear(self, message: Any) -> None:
        if message.type != "error" or any(re.search(e, message.text) for e in self._expected):
            return
        self.complaints.append(f"console: {message.text}")

    def _record(self, request: Request) -> None:
        self.requests.append(request)
        address = urlsplit(request.url)
        own = urlsplit(self.url)
        if address.scheme not in ("data", "blob") and address[:2] != own[:2]:
            self.complaints.append(f"request to another server: {request.url}")

    def expect(self, status: int) -> None:
        """Do not complain of answers with this status, which the browser reports by itself."""
        self._expected.append(f"status of {status} ")

    def expect_failures(self) -> None:
        """Do not complain of requests that get no answer."""
        self._expected.append("net::ERR_INTERNET_DISCONNECTED")

    def open(self, address: str) -> None:
        """Go to a view by its address."""
        self.page.goto(f"{self.url}/#{address}" if address else f"{self.url}/")

    def see(self, view: str) -> Locator:
        """Wait until a view shows an answer; return the view."""
        self.page.locator(DONE[view]).first.wait_for()
        return self.page.locator(f"#view-{view}")

    def see_windows(self) -> Locator:
        """Wait until `text` shows a text by its windows; return the view."""
        self.page.locator("#view-text .result .stats").first.wait_for()
        return self.page.locator("#view-text")

    def show(self, view: str) -> Locator:
        """Go to a view where something is to be seen, and wait for it."""
        self.open(SHOWN.get(view, view))
        return self.see(view)

    def button(self, name: str) -> Locator:
        """The button of this name in the view that is shown."""
        return self.page.locator("section.view:not([hidden])").get_by_role(
            "button", name=name, exact=True
        )

    def copy(self, form: str, within: str = "section.view:not([hidden])") -> str:
        """Press a button of `Copy as`; return what is in the clipboard then."""
        # The page says `Copied` for a while: of what was copied before, too.
        self.page.evaluate("navigator.clipboard.writeText('')")
        self.page.locator(within).locator(f"[data-copy={form}]:visible").first.click()
        self.page.get_by_role("status").filter(has_text="Copied").wait_for()
        read = "() => navigator.clipboard.readText()"
        return str(self.page.wait_for_function(read, polling=50).json_value())

    def drop(self, target: Locator, *paths: Path) -> None:
        """Drop files on an element."""
        files = [[path.name, list(path.read_bytes())] for path in paths]
        target.evaluate(_DROP, files)

    def wait_frames(self, count: int = 10) -> None:
        """Wait until the page has drawn what it knows so far, effects of that included."""
        frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        for _ in range(count):
            self.page.evaluate(frame)

    def see_steered(self, slider: Locator) -> Locator:
        """Wait until `steer` shows the answer to a request with a slider's value."""
        for _ in range(TIMEOUT_MS // 50):
            if self.sent_to("/steer")["steering"]["vectors"][0]["scale"] == float(
                slider.input_value()
            ):
                return self.see("steer")
            self.page.wait_for_timeout(50)
        raise AssertionError("no request has the slider's value")

    def posts(self, path: str) -> list[Request]:
        """Return the POSTs to this path."""
        return [r for r in self.requests if r.method == "POST" and urlsplit(r.url).path == path]

    def answer_to(self, path: str) -> Any:
        """Return the last answer to a POST of this path, as the page got it."""
        response = self.posts(path)[-1].response()
        assert response is not None
        return response.json()

    def all_sent_to(self, path: str) -> list[Any]:
        """Return the bodies of all POSTs to this path, without `stream`: the API's arguments."""
        bodies = [request.post_data_json for request in self.posts(path)]
        return [{name: body[name] for name in body if name != "stream"} for body in bodies]

    def sent_to(self, path: str) -> Any:
        """Return the body of the last POST to this path, as `all_sent_to` does."""
        return self.all_sent_to(path)[-1]

    def find_violations(self) -> list[str]:
        """Return what axe-core finds, a line for each rule and element."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{rule['id']} ({rule['impact']}): {node['target']} {node['html'][:160]}"
            for rule in found
            for node in rule["nodes"]
        ]

    def close(self) -> None:
        """Close the page and its browser's profile."""
        # A handler that still waits for the server is nobody's failure.
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.context.close()
