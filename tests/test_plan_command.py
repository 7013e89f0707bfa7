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
    names = ("tensor", "context", "pipeline", "data", "expert", "micro_batch")
    assert [int(word) for word in first[:6]] == [getattr(found[0].layout, name) for name in names]
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
    for words in (
        "float32 gradients",
        "hierarchical",
        "FSDP",
        "[2048, or",
        "[one a GPU]",
        "MI300X",
        "4 % of the memory",
        "llama3-405b",
    ):
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


def test_a_model_by_name_and_what_its_run_costs(capsys):
    asked = ["--model", "llama3-405b", "--gpus", "16384", "--batch", "2048", "--only", "pipeline=16"]
    status, out, _ = run(capsys, *asked, "--tokens", "15.6e12", "--price", "2", "--json", "--top", "1")
    found = json.loads(out)
    cost, seconds = found["cost"], found["plans"][0]["seconds"]["total"]
    hours = 15.6e12 / 2048 / 8192 * seconds * 16384 / 3600
    assert status == 0 and found["model"]["parameters"] == planner.MODELS["llama3-405b"].n_parameters
    assert cost["gpu_hours"] == pytest.approx(hours) and 20e6 < hours < 40e6  # 30.84 million, says its model card
    assert cost["dollars"] == pytest.approx(2 * hours) and cost["kwh"] == pytest.approx(1.3 * hours)
    assert cost["kg_co2"] == pytest.approx(0.4 * cost["kwh"])
    _, out, _ = run(capsys, *asked, "--tokens", "15.6e12", "--top", "1")
    assert "at 2.5 an hour" in out and "at 1300 W" in out and "at 0.4 kg a kWh" in out


def test_a_config_a_context_and_experts(capsys, tmp_path):
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 1000}
    mixture = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 2048, "hidden_act": "silu"}
    file.write_text(json.dumps(sizes | mixture))
    asked = ["--config", str(file), "--sequence", "16384", "--gpus", "16", "--context", "2", "--experts", "8"]
    status, out, _ = run(capsys, *asked, "--json")
    layouts = [one["layout"] for one in json.loads(out)["plans"]]
    assert status == 0 and {(one["context"], one["expert"]) for one in layouts} == {(2, 8)}
    assert "8 experts" in run(capsys, *asked)[1]


def test_serving(capsys):
    status, out, _ = run(capsys, "--model", "llama3-8b", "--gpus", "1", "--serve")
    found = planner.serving(planner.MODELS["llama3-8b"], planner.Cluster(planner.H100))
    assert status == 0 and f"{found.decode[1]:,.0f} tokens/s" in out and "predicted" in out
    status, _, err = run(capsys, "--model", "deepseek-v3", "--gpus", "8", "--serve")
    assert status == 2 and "do not fit on 8 H100" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "give one of --model, --config, and --hidden"),
        (["--hidden", "64"], "go together"),
        (["--model", "gpt5"], "no model 'gpt5'"),
        (["--model", "llama3-8b", "--config", "c.json"], "give one of"),
        (["--config", "none.json"], "No such file"),
        (["--model", "llama3-8b", "--tokens", "many"], "number of 0 or more"),
    ],
)
def test_a_model_that_is_none(capsys, arguments, words):
    status, out, err = run(capsys, "--gpus", "8", *arguments)
    assert (status, out) == (2, "") and words in err and err.count("\n") == 1


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
