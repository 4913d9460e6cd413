"""Compiles grammars of strangers in a process that may die of them.

Some small grammars take minutes, or gigabytes: intersections of expressions, thousands of patterns.
Nothing stops a thread in the midst of that. So each new grammar is compiled here first, for the
tokenizer of bytes: the system ends a process that has used up its processor time or its memory,
whatever it does, and the next grammar gets a new one.

Run as a program this is the process: a line of JSON comes for each grammar, and one goes back.
"""

import json
import resource
import subprocess
import sys
import threading
import weakref
from typing import Any

import llguidance

MEMORY = 64 * 2**20
"""Bytes that a grammar may take."""

SECONDS = 3
"""Of processor time for one grammar."""


class GrammarTrial:
    """The process, as those see it who want a grammar tried; it starts when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Any = None

    def passes(self, source: str, most_items: int) -> bool:
        """Whether a grammar can be compiled, or is wrong, without too much of anything.

        Args:
          source: as llguidance wants it.
          most_items: of a row of its parser.

        Raises:
          RuntimeError: this machine does not start the process.
        """
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([source, most_items]) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = ""
            if not answer:
                self._end()
            return bool(answer)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.returncode is not None:
            # -I: nothing of where it is started, and of who starts it, is looked at.
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, start_new_session=True,
            )  # fmt: skip
            self._end = weakref.finalize(self, _end, self._process)
            assert self._process.stdout is not None
            if not self._process.stdout.readline():
                self._end()
                raise RuntimeError("the process that tries grammars does not start")
        return self._process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    """Compile the grammars that come, until no more do."""
    tokenizer = llguidance.LLTokenizer(byte_tokenizer())
    with open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", flush=True)
    for line in sys.stdin:
        source, most_items = json.loads(line)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, hard))
        matcher = matcher_of(tokenizer, source, most_items)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print("tried", flush=True)


def matcher_of(
    tokenizer: llguidance.LLTokenizer, source: str, most_items: int
) -> llguidance.LLMatcher:
    """A grammar's matcher, with the limits that all have."""
    limits = llguidance.LLParserLimits(max_items_in_row=most_items, verbose_errors=False)
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)


def byte_tokenizer(end: int = 0, count: int = 256) -> llguidance.TokenizerWrapper:
    """A tokenizer whose ids are bytes, as llguidance wants it; the byte of the end is no text."""
    return llguidance.TokenizerWrapper(_Bytes(end, count))


class _Bytes:
    def __init__(self, end: int, count: int) -> None:
        # 0xFF begins the names of special tokens.
        self.tokens = [bytes([i]) for i in range(count)]
        self.tokens[end] = b"\xff<|end|>"
        self.eos_token_id, self.special_token_ids = end, [end]
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


if __name__ == "__main__":
    main()
