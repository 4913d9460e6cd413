"""Options of a run: their ranges, and files of them."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spmd.cli.settings import SettingsError
from spmd.models.training.errors import RunError
from spmd.models.training.options import METRICS, TrainerOptions
from spmd.models.training.run.profile import ProfileRange

COUNT = st.integers(0, 10**6)
OPTIONS = st.builds(
    TrainerOptions,
    steps=st.integers(1, 10**6),
    run_dir=st.none() | st.text("ab/ :#'\"{}[],*&!|>%@~0", min_size=1) | st.just("-a: b"),
    resume=st.none() | st.just("auto") | COUNT,
    seed=COUNT,
    microbatches=st.integers(1, 8),
    on_nonfinite=st.sampled_from(["stop", "skip"]),
    eval_every=COUNT,
    eval_first=st.booleans(),
    keep_last=st.integers(1, 9),
    metrics=st.sampled_from([(), METRICS[:1], METRICS]),
    profile=st.none() | st.builds(ProfileRange, st.integers(1, 70), st.integers(70, 99)),
    watchdog_timeout=st.floats(0.0, 1e9) | COUNT.map(float),
    verbose=st.booleans(),
)


@given(OPTIONS)
def test_a_file_of_all_options_reads_back(tmp_path_factory: pytest.TempPathFactory, options):
    file = tmp_path_factory.getbasetemp() / "options.yaml"
    values = dataclasses.asdict(options)
    values |= {"metrics": list(options.metrics)}
    values["profile"] = None if options.profile is None else str(options.profile)
    file.write_text(yaml.safe_dump(values))
    assert TrainerOptions.from_yaml(file) == options
    assert TrainerOptions.from_yaml(file, steps=3) == dataclasses.replace(options, steps=3)


def test_a_file_as_people_write_it(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("# half a day\nsteps: 100\nsave_every: 20\nprofile: 10:13\nmetrics: [jsonl]\n")
    assert TrainerOptions.from_yaml(file, run_dir=tmp_path) == TrainerOptions(
        steps=100, save_every=20, profile=ProfileRange(10, 13), metrics=("jsonl",), run_dir=tmp_path
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("keep_lasts: 3", "run.yaml:2: no setting is called 'keep_lasts'; the nearest is 'keep_l"),
        ("profile: 9", "run.yaml:2: profile: '9' is not of the form first:last, as in 10:13"),
        ("resume: soon", "run.yaml:2: resume: 'soon' is no step, and not auto"),
        ("on_nonfinite: hope", "run.yaml:2: on_nonfinite: invalid choice: 'hope'"),
        ("metrics: [json]", "run.yaml:2: metrics: 'json' is no file of metrics; there are jsonl"),
        ("verbose: on", "run.yaml:2: verbose: takes true or false, not 'on'"),
    ],
)
def test_what_is_said_to_bad_files(tmp_path: Path, line: str, says: str):
    (tmp_path / "run.yaml").write_text(f"steps: 10\n{line}\n")
    with pytest.raises(SettingsError) as caught:
        TrainerOptions.from_yaml(tmp_path / "run.yaml")
    assert str(caught.value).startswith(f"{tmp_path}/{says}")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"steps": 0}, "steps must be positive, not 0"),
        ({"keep_last": 0}, "keep_last must be positive, not 0"),
        ({"save_every": -1}, "save_every must be at least 0, not -1"),
        ({"audit_steps": True}, "audit_every says which"),
        ({"on_nonfinite": "hope"}, "on_nonfinite is 'hope', not one of stop, skip"),
        ({"metrics": ("json",)}, "'json' is no file of metrics; there are jsonl"),
    ],
)
def test_ranges(values, says: str):
    with pytest.raises(RunError, match=says):
        TrainerOptions(**{"steps": 1, **values})
