"""The chat page in a real browser: it streams, stops, remembers, and shows text as nothing else."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from spmd.serving.engine.backend import SlotPart
from spmd.serving.http.limits import ServerOptions
from tests.explain.browser import Browser, find_browser
from tests.serving.engine.fake_backend import LIMITS, FakeBackend
from tests.serving.http.live import MODEL, Live, get, serving
from tests.waiting import wait_until

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium on this machine: apt-get install chromium"
)

REPLY = """\
Each device holds a *tile* of the matrix. With a mesh of 4 × 2 and the spec ("data", "model"), \
rows are split four ways and columns two ways:

```python
w = spmd.mark_sharding(w, mesh, ("data", "model"))
```

<b onclick="alert(1)">Nothing</b> here is HTML; é, 中 and 😀 come whole.\0"""


class Speaker(FakeBackend):
    """Says the same thing to everybody."""

    def __init__(self) -> None:
        super().__init__(dataclasses.replace(LIMITS, max_length=4096, pages=1024))
        self.said = [0] * LIMITS.slots
        self.prompts: list[str] = []

    def begin(self, slot: int, sampling: Any, seen: Any, drawn: Any = ()) -> None:
        super().begin(slot, sampling, seen, drawn)
        self.said[slot] = 0
        self.prompts.append(bytes(seen).decode(errors="replace"))

    def _draw(self, part: SlotPart) -> list[int]:
        said = self.said[part.slot]
        self.said[part.slot] += 1
        self.latest[part.slot] = token = (*REPLY.encode(), 0, 0)[said]  # one step is ahead
        return [token]


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker()


@pytest.fixture(scope="module")
def live(speaker: Speaker) -> Iterator[Live]:
    with serving(speaker) as running:
        yield running


@pytest.fixture(scope="module")
def browser(live: Live, tmp_path_factory: Any) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as made:
        made.resize(1240)
        yield made


@pytest.fixture
def page(live: Live, browser: Browser) -> Iterator[Browser]:
    visit(browser, live)
    browser.run("localStorage.clear()")
    visit(browser, live)
    yield browser
    assert {url.partition(live.url)[0] for url in browser.requests} <= {"", "data:,"}


def visit(page: Browser, live: Live) -> None:
    page.run("document.title = ''")
    page.call("Page.navigate", url=f"{live.url}/")
    wait(page, f"document.title === '{MODEL}'")


def wait(page: Browser, script: str) -> None:
    """Until a JavaScript expression is true."""
    wait_until(lambda: page.run(script), lambda: script)


def say(page: Browser, text: str) -> None:
    page.run("document.getElementById('input').focus()")
    page.type(text)
    page.press("Enter")


TURNS = "[...document.querySelectorAll('.turn .bubble')].map(b => b.textContent)"
DONE = "!document.querySelector('.live') && document.querySelectorAll('.assistant').length === "
FACTS = "[...document.querySelectorAll('.assistant .facts')].at(-1).textContent"


def test_a_conversation(page: Browser, live: Live, speaker: Speaker) -> None:
    question = "How is <script>w</script> split?"
    live.backend.gate.close(after=20)
    say(page, question)
    wait(page, "document.querySelector('.live .bubble')?.textContent.length > 5")
    assert page.run("document.getElementById('send').textContent") == "Stop"
    live.backend.gate.open()
    wait(page, DONE + "1")
    asked, answered = page.run(TURNS)
    assert asked == question
    shown = REPLY.rstrip("\0").replace("```python\n", "").replace("```", "")
    assert "".join(answered.split()) == "".join(shown.split())
    assert page.run("document.querySelectorAll('.turn b, .turn script').length") == 0
    assert page.run("document.querySelector('.turn pre').textContent").startswith("w = spmd.")
    assert page.run(FACTS).startswith(f"{len(REPLY.encode())} tokens · ")
    assert "tokens/s" in page.run(FACTS)
    # It is still there when the page is opened again, and the model is told all of it.
    visit(page, live)
    assert page.run(TURNS) == [asked, answered]
    say(page, "And then?")
    wait(page, DONE + "2")
    assert f"User: {question}\n\nAssistant: Each" in speaker.prompts[-1]
    assert page.run("document.documentElement.scrollHeight") == 900  # all of it is to be seen
    page.run("document.getElementById('new').click()")
    assert page.run(TURNS) == []
    visit(page, live)
    assert page.run(TURNS) == []


@pytest.mark.parametrize("way", ["Escape", "click", "new"])
def test_stopping(page: Browser, live: Live, way: str) -> None:
    engine = live.service.language().engine
    before = engine.state().counts.cancelled
    live.backend.gate.close(after=20)
    say(page, "Tell me.")
    wait(page, "document.querySelector('.live .bubble')?.textContent.length > 5")
    if way == "Escape":
        page.press("Escape")
    else:
        page.run(f"document.getElementById('{'send' if way == 'click' else 'new'}').click()")
    wait(page, "document.getElementById('send').textContent === 'Send'")
    live.wait_idle()
    live.backend.gate.open()
    assert engine.state().counts.cancelled == before + 1
    if way == "new":
        assert page.run(TURNS) == []
        return
    assert page.run(FACTS).endswith("stopped")
    _, answered = page.run(TURNS)
    assert REPLY.startswith(answered)


def test_what_goes_wrong_is_said(page: Browser) -> None:
    page.run("document.getElementById('show-settings').click()")
    assert page.run("document.activeElement.id") == "system"
    page.run("document.getElementById('max_tokens').value = 5000")
    say(page, "Too much.")
    wait(page, DONE + "1")
    assert "max_tokens: an integer from 1 to 4096 is needed, not 5000" in page.run(FACTS)
    page.run("document.getElementById('max_tokens').value = 3")
    say(page, "Less.")
    wait(page, DONE + "2")
    assert page.run(TURNS)[-1] == "Eac"


def test_enter_with_shift_begins_a_line(page: Browser) -> None:
    page.run("document.getElementById('input').focus()")
    page.type("one\ntwo")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", modifiers=8)
    assert page.run(TURNS) == []
    assert page.run("document.getElementById('input').clientHeight") > 50


def test_the_page_may_load_nothing_from_elsewhere(live: Live) -> None:
    response = get(f"{live.url}/")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-type"].startswith("text/html")
    for path, kind in (("chat.js", "text/javascript"), ("chat.css", "text/css")):
        file = get(f"{live.url}/static/{path}")
        assert file.headers["content-type"].startswith(kind)
        assert "http" not in file.text


def test_a_key_is_asked_for_and_kept_to_the_page(live: Live, browser: Browser) -> None:
    with serving(Speaker(), ServerOptions(api_keys=("secret",))) as locked:
        browser.call("Page.navigate", url=f"{locked.url}/")
        wait(browser, "document.getElementById('status')?.textContent.includes('API key')")
        browser.run("document.getElementById('show-settings').click()")
        browser.run("document.getElementById('key').focus()")
        browser.type("secret")
        browser.run("document.getElementById('input').focus()")
        wait(browser, f"document.title === '{MODEL}'")
        say(browser, "Hello?")
        wait(browser, DONE + "1")
        assert browser.run(TURNS)[1].startswith("Each device")
        assert "secret" not in browser.run("JSON.stringify(localStorage)")
        browser.requests.clear()


@pytest.mark.thorough
def test_questions_without_an_answer_are_not_sent_again(page: Browser) -> None:
    """Templates such as Llama 2's refuse two questions in a row."""
    page.run("""messages = [
        { role: "user", content: "a" }, { role: "assistant", content: "b" },
        { role: "user", content: "lost" }, { role: "assistant", content: "", error: true },
        { role: "user", content: "stopped" }, { role: "assistant", content: "" },
        { role: "user", content: "c" }]""")
    said = page.run("makeBody().messages.map((m) => `${m.role} ${m.content}`).join()")
    assert said == "user a,assistant b,user c"


def test_several_models_are_a_choice(page: Browser) -> None:
    page.run(
        "window.fetch = async () => new Response(JSON.stringify({data: [{id: 'a'}, {id: 'b'}]})); "
        "showModel()"
    )
    wait(page, "document.title === 'a' && !document.getElementById('models').hidden")
    page.run("models.value = 'b'; models.dispatchEvent(new Event('change'))")
    wait(page, "document.title === 'b' && makeBody().model === 'b'")
