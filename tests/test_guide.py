"""The guide in docs/guide: its steps run and agree, and what it quotes is what they hold and what the package says."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
import torch

import sgc_backend
from sgc_backend import ReplayError

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guide"
TEXT = (GUIDE / "README.md").read_text(encoding="utf-8")
STEPS = sorted(path.name for path in GUIDE.glob("step*.py"))
SERVE = "RESULT = Engine().serve(PROMPTS)"
DECLARED, NAMED = 'sgc_backend.register_attention("guide::attend")\n', 'custom_op("guide::attend"'
BUCKETS = "sizes=[4, 8, 16, 32]"
NEW_WEIGHT = "up = e.model.layers[0].up\nup.weight = nn.Parameter(up.weight * 2)\n"


@functools.cache
def run_step(name: str, device: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "SGC_DEVICE": device, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(GUIDE / name)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def run_changed(name: str, *changes: tuple[str, str], last: str = SERVE) -> dict[str, object]:
    """The names of a step after it ran with some text replaced, and with ``last`` instead of its main block."""
    source = (GUIDE / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    source, *_ = source.partition('if __name__ == "__main__":')
    names: dict[str, object] = {"__name__": "changed_step"}
    exec(compile(source + last, str(GUIDE / name), "exec"), names)
    return names


def tokens_of(printed: str) -> list[list[int]]:
    return [[int(word) for word in line.split(":")[1].split()] for line in printed.splitlines()]


def blocks(kind: str, text: str = TEXT) -> list[str]:
    """The fenced excerpts of a kind: python is in the section's step, text is an error, console is printed."""
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def eager() -> str:
    """What step 0 prints."""
    return run_step("step0_eager.py", "emulated").stdout


# -- the steps -------------------------------------------------------------------------------------------------------


def test_step_0_serves_several_requests_of_different_lengths(eager: str) -> None:
    lengths = {len(line.split(":")[1].split()) for line in eager.splitlines()}
    assert len(eager.splitlines()) == 6 and len(lengths) > 3
    assert all(len(set(tokens)) >= 5 for tokens in tokens_of(eager))  # not one token over and over


@pytest.mark.parametrize("name", STEPS[1:])
def test_a_step_prints_what_step_0_prints(name: str, eager: str) -> None:
    assert run_step(name, "emulated").stdout == eager


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_a_step_prints_on_cuda_what_step_0_prints(name: str) -> None:
    if '"sgc_piecewise"' in (GUIDE / name).read_text() and "sgc_piecewise" not in torch._dynamo.list_backends():
        pytest.skip("the step names the backend, which needs the package installed")
    assert run_step(name, "").stdout == run_step("step0_eager.py", "").stdout


def test_a_fault_in_attention_would_be_seen(eager: str) -> None:
    shorter = run_changed("step0_eager.py", ("int(positions.max()) + 1", "2"))["RESULT"]
    assert all(a != b for a, b in zip(shorter, tokens_of(eager), strict=True))


def test_step_0_is_short_and_knows_nothing_of_the_package() -> None:
    path = GUIDE / "step0_eager.py"
    idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with path.open("rb") as file:
        code = {t.start[0] for t in tokenize.tokenize(file.readline) if t.type not in (*idle, tokenize.ENCODING)}
    assert len(code) <= 68  # about 60, and the docstring
    assert "sgc_backend" not in path.read_text(encoding="utf-8")


def test_no_step_needs_the_demo() -> None:
    assert not [name for name in STEPS if "demo" in (GUIDE / name).read_text(encoding="utf-8")]


# -- the text --------------------------------------------------------------------------------------------------------


SECTIONS = re.findall(r"^File: \[(.*?)\].*?(?=^## |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE)


def test_every_step_has_a_section() -> None:
    assert sorted(SECTIONS) == STEPS


@pytest.mark.parametrize("name", STEPS)
def test_every_excerpt_is_in_its_sections_file(name: str) -> None:
    section = re.search(rf"^File: \[{re.escape(name)}\].*?(?=^## |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE)
    excerpts = blocks("python", section[0])
    assert excerpts
    source = "\n" + (GUIDE / name).read_text(encoding="utf-8")
    assert [e for e in excerpts if "\n" + e not in source] == []


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", ["docs/guide/README.md", "README.md"])
def test_every_relative_link_leads_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert links
    for link in links:
        path, _, part = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if part:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert part in map(anchor, headings), link


def test_the_readme_links_the_guide() -> None:
    assert "(docs/guide/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


# -- what goes wrong -------------------------------------------------------------------------------------------------


ERRORS = {
    "decode that waits": ("step2_decode.py", [("positions, attend_all)", "positions, attend)")], SERVE),
    "no capture": ("step2_decode.py", [("        self.decode_runner.capture()\n", "")], SERVE),
    "too many rows": ("step2_decode.py", [("max_size=MAX_REQUESTS)", "max_size=2)")], SERVE),
    "no mark": ("step3b_breakable.py", [("@eager_on_graph\n", "")], SERVE),
    "strict": ("step5_production.py", [(BUCKETS, "sizes=[4, 8]")], SERVE),
    "variant": ("step5_production.py", [], "Engine().serve(PROMPTS, adapter='parrot')"),
    "verify": ("step5_production.py", [], "e = Engine()\ne.run(e.verify_runner, [(0, TRASH, 0)] * 4, None)"),
    "weights": ("step5_production.py", [], f"e = Engine()\n{NEW_WEIGHT}e.serve(PROMPTS)"),
    "closed": ("step5_production.py", [], "e = Engine()\ne.close()\ne.serve(PROMPTS)"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_quoted_error_is_what_the_package_says(case: str) -> None:
    name, changes, last = ERRORS[case]
    with pytest.raises(sgc_backend.SgcError) as error:
        run_changed(name, *changes, last=last)
    said = re.sub(r"Runner #\d+", "Runner", str(error.value))  # another test's runner may still be alive
    said = re.sub(r"graph \d+", "graph 0", said)
    assert f"{error.type.__name__}: {said}\n" in blocks("text")


def test_every_quoted_error_is_tested() -> None:
    assert len(blocks("text")) == len(ERRORS)


def test_padding_rows_in_a_real_slot_change_tokens_and_raise_nothing(eager: str) -> None:
    assert run_changed("step2_decode.py")["RESULT"] == tokens_of(eager)
    assert run_changed("step2_decode.py", (", pad=TRASH", ""))["RESULT"] != tokens_of(eager)


def test_an_undeclared_operator_that_waits_for_the_device_is_cut_once_a_capture_failed(
    eager: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes = [(DECLARED, ""), (NAMED, 'custom_op("guide::undeclared"')]
    with caplog.at_level("WARNING", "sgc_backend"):
        assert run_changed("step3_prefill.py", *changes)["RESULT"] == tokens_of(eager)
    assert "a capture failed in guide::undeclared" in caplog.text


def test_an_undeclared_operator_that_reads_a_host_number_has_it_frozen_and_raises_nothing(eager: str) -> None:
    def with_length(op: str, *more: tuple[str, str]) -> object:
        changes = [
            ("int(positions.max()) + 1", "HOST[0]"),
            ("TRASH = MAX", "HOST = [1]\nTRASH = MAX"),
            (
                "        return self.prefill_runner(",
                "        HOST[0] = max(positions) + 1\n        return self.prefill_runner(",
            ),
            (NAMED, f'custom_op("{op}"'),
        ]
        return run_changed("step3_prefill.py", *changes, *more)["RESULT"]

    declared = DECLARED.replace("attend", "attend_declared")  # what is declared stays so to the end of the process
    assert with_length("guide::attend_declared", (DECLARED, declared)) == tokens_of(eager)
    assert with_length("guide::attend_frozen", (DECLARED, "")) != tokens_of(eager)


def test_a_full_graph_refuses_a_replaced_weight_until_it_is_captured_again() -> None:
    same = "e = Engine()\nkept = e.model.layers[0].up.weight\n{}RESULT = e.decode([(1, TRASH, 0)]).tolist()"
    before = run_changed("step2_decode.py", last=same.format(""))["RESULT"]
    zeroed = "e.model.layers[0].up.weight = nn.Parameter(kept * -40)\n"
    with pytest.raises(ReplayError, match=r"layers\.0\.up\.weight moved since key 1 was captured"):
        run_changed("step2_decode.py", last=same.format(zeroed))
    again = zeroed + "e.decode_runner.capture()\n"
    assert run_changed("step2_decode.py", last=same.format(again))["RESULT"] != before


def test_the_quoted_report_is_what_step_4_prints() -> None:
    printed = run_step("step4_startup.py", "emulated").stderr
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert lines and [line for line in lines if line not in printed] == []
