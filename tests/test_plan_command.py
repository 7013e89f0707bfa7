"""`python -m dlojz_tp plan`: its table, its JSON, its figure, its one-line errors."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from dlojz_tp import planner
from dlojz_tp.commands import plan

SMALL = ["--hidden", "4096", "--layers", "32", "--gpus", "64"]


def run(capsys, *arguments):
    """(exit status, standard output, standard error)"""
    try:
        status = plan.main([*arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def test_table(capsys):
    status, out, _ = run(capsys, *SMALL)
    head, cards, *rest = out.splitlines()
    assert (
        status == 0
        and "6.7 billion" in head
        and "32 heads" in head
        and "64 H100" in cards
        and "source: NVIDIA" in cards
    )
    assert "float32 gradients" in out and "hierarchical" in out and "FSDP" in out
    begin = next(k for k, line in enumerate(rest) if line.startswith("tensor"))
    rows = rest[begin + 1 : -3]
    assert len(rows) == 10
    found = planner.search(planner.GPT(4096, 32, 32), planner.Cluster(planner.H100), 64, 64)
    first = rows[0].split()
    assert [int(word) for word in first[:4]] == [
        getattr(found[0].layout, k) for k in ("tensor", "pipeline", "data", "micro_batch")
    ]
    assert f"{found[0].time.total:.3f}" in rows[0] and found[0].time.binds in rows[0]
    assert f"{len(found)} layouts" in rest[-2]


def test_json_and_only(capsys):
    status, out, _ = run(
        capsys, *SMALL, "--json", "--top", "3", "--only", "zero=3", "--only", "overlap=false", "--batch", "128"
    )
    found = json.loads(out)
    assert (
        status == 0
        and len(found["plans"]) == 3
        and found["model"]["parameters"] == planner.GPT(4096, 32, 32).n_parameters
    )
    for one in found["plans"]:
        assert one["layout"]["zero"] == 3 and one["layout"]["overlap"] is False
        for kind in ("bytes", "seconds"):
            total = one[kind].pop("total")
            assert total == pytest.approx(sum(one[kind].values()))


def test_the_header_says_what_was_asked(capsys):
    _, out, _ = run(capsys, *SMALL, "--plain-attention", "--only", "overlap=false", "--only", "zero=2")
    assert "plain\nattention" in out and "\nonly: overlap=false, zero=2\n" in out


def test_figure(capsys, tmp_path):
    status, _, _ = run(capsys, *SMALL, "--figure", str(tmp_path / "plan.png"))
    assert status == 0
    with Image.open(tmp_path / "plan.png") as image:
        assert image.width > 800


def test_help_states_the_defaults(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for words in ("float32 gradients", "hierarchical", "FSDP", "[2048]", "[one a GPU]", "MI300X", "10 % of the memory"):
        assert words in out


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["--gpus", "1", "--hidden", "12288"], 1, "no layout fits"),
        (["--gpus", "none"], 2, "must be a whole number"),
        (["--gpu", "K80"], 2, "no card 'K80'"),
        (["--heads", "7"], 2, "7 heads must divide"),
        (["--only", "zero=9"], 2, "zero is one of 0, 1, 2, 3"),
        (["--only", "zero"], 2, "zero is a whole number"),
        (["--only", "colour=red"], 2, "NAME is one of tensor"),
        (["--only", "overlap=2"], 2, "true or false"),
        (["--only", "schedule=best"], 2, "schedule is one of"),
        (["--depth", "3"], 2, "unrecognized arguments"),
    ],
)
def test_one_line_says_what_is_wrong(capsys, arguments, status, words):
    got, out, err = run(capsys, *SMALL, *arguments)
    assert (got, out) == (status, "") and words in err and err.count("\n") == 1


def test_a_card_of_ones_own(capsys, tmp_path):
    file = tmp_path / "card.toml"
    file.write_text('like = "V100"\nname = "V100 32 GB"\nmemory = 32e9\n')
    assert planner.read_card(str(file)).memory == 32e9 and planner.read_card(str(file)).link == planner.V100.link
    status, out, _ = run(capsys, *SMALL, "--gpu", str(file), "--top", "1")
    assert status == 0 and "64 V100 32 GB" in out and f"source: {file}" in out
    (tmp_path / "card.json").write_text(json.dumps({"like": "H100", "name": "mine", "network": 100e9, "source": "me"}))
    assert planner.read_card(str(tmp_path / "card.json")).source == "me"


@pytest.mark.parametrize(
    "text, words",
    [
        ("name = 3", "lacks"),
        ("name = ", "card.toml"),
        ('like = "K80"', "like is one of"),
        ('like = "H100"\ncolour = 1', "unknown here: colour"),
        ('like = "H100"\nmemory = "80 GB"', "no value"),
        ('like = "H100"\nmemory = -1', "no value"),
        ('like = "H100"\nlink = nan', "no value"),
        ('like = "H100"\nname = 5', "no value"),
        ('like = "H100"\nmesh = 1', "no value"),
    ],
)
def test_a_card_that_is_none(capsys, tmp_path, text, words):
    (tmp_path / "card.toml").write_text(text)
    status, _, err = run(capsys, *SMALL, "--gpu", str(tmp_path / "card.toml"))
    assert status == 2 and words in err and err.count("\n") == 1
    assert run(capsys, *SMALL, "--gpu", str(tmp_path / "none.toml"))[0] == 2


def test_in_a_shell():
    done = subprocess.run(
        [sys.executable, "-m", "dlojz_tp", "plan", *SMALL, "--top", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "GPT of" in done.stdout
