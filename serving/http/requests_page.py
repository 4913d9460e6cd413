"""`GET /requests`: where the time of the latest requests went, as a page with pictures or as JSON.

The page is whole in itself, without scripts and other files, so that it can be kept and sent.
"""

import asyncio
import base64
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from spmd.errors import seconds_text
from spmd.explain.page.html import Html, drawing, line, rect, tag, words
from spmd.serving.errors import ApiError, invalid
from spmd.serving.http.requests import PAGE_HEADERS, check_key, error_response, service_of
from spmd.serving.http.service import Service
from spmd.serving.http.timeline import PHASES, REASONS, TO_FIRST_TOKEN, tell

Told = dict[str, Any]
Show = Callable[[float], str]
Bar = tuple[float, float, dict[str, float]]  # start, end, heights by class

_CSS = """
h2 { display: block; margin: 30px 0 2px; } a { color: var(--accent); text-decoration: none; }
.legend svg { display: inline; margin-right: 6px; } td { white-space: nowrap; }
td svg { margin: 5px 0; }
.body, .host, .drafts { fill: #8e9aa8; } .tokens { fill: #c77f9f; } .step, .long { fill: #8fb1f2; }
.queue, .prompts { fill: #dca03a; } .prompt, .own { fill: #3f76d8; } .send, .mask { fill: #2f9c86; }
.draw, .drawing { fill: #8fb1f277; } .text { fill: #9a62c7; } .end, .padded { fill: #8884; }
.preempted { fill: var(--bad); } .bad { color: var(--bad); }
"""
_STYLE = files("spmd.explain.page").joinpath("report.css").read_text(encoding="utf-8") + _CSS
_HASH = f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"
_POLICY = PAGE_HEADERS["Content-Security-Policy"].replace("style-src", f"style-src {_HASH}")
_HEADERS = {**PAGE_HEADERS, "Content-Security-Policy": _POLICY}
_ROWS = {"own": "its rows", "prompts": "others' prompts", "drawing": "drawing", "padded": "padding"}
_LEFT, _ACROSS = 76, 1010
"""Where charts begin, and how wide they are, in pixels."""


async def requests(request: Request) -> Response:
    """`GET /requests`: the latest requests; with `id`, the timeline of one of them.

    With several API keys, each sees its own requests. A browser may send a key as the password.
    """
    service, asked = service_of(request), request.query_params
    try:
        key = check_key(request, basic=True)
    except ApiError as error:
        response: Response = error_response(request, error)
        response.headers["WWW-Authenticate"] = 'Basic realm="the password is an API key"'
        return response
    form = asked.get("format", "json" if "json" in request.headers.get("accept", "") else "html")
    if form not in ("html", "json"):
        raise invalid(f"format: html or json, not {form[:20]!r}")
    # Looking through thousands of steps takes milliseconds, in which others are answered.
    told = await asyncio.to_thread(_tell, service, key, asked.get("id"))
    if form == "json":
        return JSONResponse({"requests": told})
    return HTMLResponse(_page(told, asked.get("id")), headers=_HEADERS)


def _tell(service: Service, key: str, name: str | None) -> list[Told]:
    """The completions of one request, or of all without their steps, the latest first."""
    told, since_1970 = [], time.time() - time.monotonic()
    steps = None if name is None else list(service.language().metrics.steps)
    for exchange in sorted(service.traffic.completed.copy(), key=lambda one: -one.started):
        if exchange.key == key and name in (None, exchange.request_id) and exchange.stream:
            at = {"time": round(since_1970 + exchange.started, 3)}
            for one in sorted(exchange.stream.records, key=lambda record: record.choice):
                told.append(at | tell(exchange, one, exchange.stream.keys[one.choice], steps))
    if name is not None and not told:
        raise ApiError(404, "id: none of the latest requests has it; /requests lists them")
    return told


def _page(told: Sequence[Told], name: str | None) -> str:
    title = "Requests" if name is None else f"Request {name}"
    head = tag("meta", charset="utf-8"), tag("title", title), tag("style", Html(_STYLE))
    body = [tag("p", "The latest requests, and where the time to their first tokens went.")]
    body += [_legend({name: PHASES[name] for name in TO_FIRST_TOKEN}), _table(told)]
    if name is not None:
        body = [tag("p", tag("a", "All requests", href="requests")), _table(told)]
        body += [part for one in told for part in _pictures(one)]
    html = tag("html", tag("head", *head), tag("body", tag("h1", title), *body), lang="en")
    return f"<!doctype html>\n{html}\n"


def _table(told: Sequence[Told]) -> Html:
    waits = [one["first_token_seconds"] or one["seconds"] for one in told]
    scale = 300 / max(waits, default=1.0)
    names = "time (UTC)", "request", "end", "prompt", "drawn", "in all", "first token", ""
    looks = ["td", "td", "td", "td.n", "td.n", "td.n", "td.n", "td"]
    rows = [zip((look.replace("td", "th") for look in looks), names, strict=True)]
    for one, wait in zip(told, waits, strict=True):
        when = time.strftime("%H:%M:%S", time.gmtime(one["time"])) + f"{one['time'] % 1:.3f}"[1:]
        link = tag("a", one["request_id"], href=f"requests?id={quote(one['request_id'], safe='')}")
        counts = f"{one['prompt_tokens']:,}", f"{one['completion_tokens']:,}"
        times = seconds_text(one["seconds"]), seconds_text(wait)
        bar = drawing("bar", 300, 12, _bar(one, 0, 0, 12, scale), "parts of the time")
        is_well = one["finish_reason"] in ("stop", "length")
        end = tag("span" if is_well else "span.bad", one["finish_reason"])
        rows.append(zip(looks, (when, link, end, *counts, *times, bar), strict=True))
    return tag("table", *(tag("tr", *(tag(*cell) for cell in row)) for row in rows))


def _bar(one: Told, x: float, y: float, height: float, scale: float) -> Iterator[Html]:
    for name, (a, b) in one["phases"].items():
        if name in TO_FIRST_TOKEN and b > a:
            box = x + a * scale, y, (b - a) * scale, height
            yield rect(name, box, f"{name}: {seconds_text(b - a)}")


def _legend(named: dict[str, str]) -> Html:
    keys = {name: drawing("", 11, 11, [rect(name, (0, 0, 11, 11))], name) for name in named}
    return tag("p.legend", *(tag("span", keys[name], text) for name, text in named.items()))


def _pictures(one: Told) -> Iterator[Html]:
    """The steps up to a completion's first token, and the gaps between its tokens."""
    yield tag("h2", f"Completion {one['index']}: to its first token")
    spans = {name: seconds_text(end - start) for name, (start, end) in one["phases"].items()}
    yield _legend({name: f"{span} {PHASES[name]}" for name, span in spans.items()})
    bars = [(x["start"], x["end"], {n: x[f"{n}_rows"] for n in _ROWS}) for x in one["steps"]]
    end = one["first_token_seconds"] or one["seconds"]
    phases = _bar(one, _LEFT, 12, 26, _ACROSS / max(end, 1e-9))
    yield _chart(0.0, end, "{} rows".format, bars, phases)
    yield _legend(_ROWS)
    if gaps := [(gap["start"], gap["end"], gap["late"]) for gap in one["gaps"]]:
        yield tag("h2", "Between its tokens")
        bars = [(a, b, {why or "drawing": b - a}) for a, b, why in gaps]
        yield _chart(gaps[0][0], gaps[-1][1], seconds_text, bars, ())
        late = [why for _, _, why in gaps if why]
        told = {why: f"{late.count(why)} of {len(gaps)}: {REASONS[why]}" for why in REASONS}
        yield _legend({why: text for why, text in told.items() if why in late})


def _chart(start: float, end: float, show: Show, bars: list[Bar], above: Iterable[Html]) -> Html:
    """Stacked bars over time; `show` makes texts of their heights."""
    scale, shapes = _ACROSS / max(end - start, 1e-9), [*above]
    most = max((sum(heights.values()) for _, _, heights in bars), default=0) or 1
    bottom = 176 if shapes else 140
    shapes.append(words(_LEFT - 8, bottom - 120, show(most), "soft", text_anchor="end"))
    for i in range(6):
        x, at = _LEFT + _ACROSS * i / 5, start + (end - start) * i / 5
        anchor, text = "end" if i == 5 else "middle", seconds_text(at) if at else "0"
        shapes.append(line("tick", x, bottom - 134, x, bottom + 4))
        shapes.append(words(x, bottom + 18, text, "soft", text_anchor=anchor))
    for a, b, heights in bars:
        x, y = _LEFT + (max(a, start) - start) * scale, float(bottom)
        width = max((min(b, end) - max(a, start)) * scale - 0.6, 0.6)
        title = ", ".join(f"{show(value)} {name}" for name, value in heights.items())
        for name, value in heights.items():
            y -= (height := 130 * value / most)
            shapes += [rect(name, (x, y, width, height), title)] if value else []
    return drawing("chart", _LEFT + _ACROSS + 2, bottom + 24, shapes, "what ran when")
