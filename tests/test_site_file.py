"""The site file of a hub: what is wrong in it is one line; what is right asks Slurm for it."""

import importlib.util
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
SPEC = importlib.util.spec_from_file_location("site_file", DEPLOY / "site_file.py")
site_file = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site_file)


def site(tmp_path, text):
    (tmp_path / "site.toml").write_text(text)
    return site_file.read(tmp_path / "site.toml")


def test_the_file_that_comes_with_the_course_names_every_option():
    text = (DEPLOY / "site.toml").read_text()
    given = site_file.read(DEPLOY / "site.toml")
    assert set(given) == set(site_file.USUAL)
    for name, usual in site_file.USUAL.items():
        if not isinstance(usual, dict):
            assert f"\n{name} = " in text and (given[name] == usual or name == "folder")


def test_left_out_options_have_their_usual_values(tmp_path):
    assert site(tmp_path, "port = 9000")["idle_minutes"] == 60
    assert site(tmp_path, "idle_minutes = 0.5")["idle_minutes"] == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 8000", "prot is not known; servers, port, "),
        ('port = "8000"', "port = '8000' is not of the kind of 8000"),
        ("users = 3", "users = 3 is not of the kind of []"),
        ('servers = "nowhere"', "'nowhere'"),
        ('servers = "slurm"', "at least one of [profiles]"),
        ("[profiles.a]\nmemmory = '1G'", "a: memmory is not known"),
        ("[profiles]\na = 1", "a table is needed"),
        ("port = ", "cannot be read"),
        ("port = 8000.5", "port = 8000.5 is not of the kind of 8000"),
        ("port = 70000", "port is from 1 to 65533, not 70000"),
        ("users = [3]", "users are names, not [3]"),
        ("admins = [true]", "admins are names, not [True]"),
        ("[profiles.a]\ngpus = 0.5", "gpus = 0.5 is not of the kind of 0"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, text, words):
    with pytest.raises(ValueError) as refused:
        site(tmp_path, text)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "site.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="site.toml cannot be read"):
        site_file.read(tmp_path / "site.toml")


def test_a_profile_in_words_and_for_sbatch(tmp_path):
    text = "[profiles.a]\ncores = 2\ngpus = 1\nhours = 1.5\nsbatch = { exclusive = true, qos = 'q' }"
    profile = site(tmp_path, text)["profiles"]["a"]
    assert site_file.in_words(profile) == "2 cores, 1 GPU, ends after 1.5 h"
    lines = site_file.sbatch_lines(profile).splitlines()
    for line in ("cpus-per-task=2", "time=90", "gpus-per-node=1", "exclusive", "qos=q"):
        assert f"#SBATCH --{line}" in lines
    assert not any("--mem" in line or "account" in line for line in lines)
