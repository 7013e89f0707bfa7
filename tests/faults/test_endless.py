"""An answer that never ends: a calm line says what runs, Stop ends it, and else a verdict comes."""

import time

import nbformat
import pytest
from jupyter_client.manager import run_kernel
from nbclient import NotebookClient

from dlojz_tp import course
from dlojz_tp.judging.checking import verdict_of
from dlojz_tp.works import source

WORK = source.find("01_gpu_acceleration")
OPEN = """
import time, torch
import torch.nn.functional as F
from dlojz_tp import course
tp = course.open("01_gpu_acceleration")
course.LONG_S = 1.0
"""
ENDLESS = """
def train_step(model, images, labels, optimizer, device):
    while True:
        pass
"""
RIGHT = source.without_markers(WORK.balises[2].code)
SLOW = RIGHT.replace("    images =", "    time.sleep(0.3)\n    images =", 1)
STILL = "judging balise 2 for more than 1 s"


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("DLOJZ_STRICT", raising=False)


def shown(client, cell, act=lambda said: None):
    """What a cell displays, in order: (display id, text). act: is called with each."""
    asked, found = client.execute(cell), []
    while True:
        message = client.get_iopub_msg(timeout=100)
        if message["parent_header"].get("msg_id") != asked:
            continue
        content = message["content"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            found.append((content.get("transient", {}).get("display_id"), content["data"]["text/plain"]))
            act(found[-1][1])
        elif message["msg_type"] == "error":
            raise AssertionError("\n".join(content["traceback"]))
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            return found


def test_an_endless_answer_is_said_to_run_and_stop_ends_it():
    with run_kernel() as client:
        shown(client, OPEN)
        shown(client, f"{RIGHT}\n\ntp.check(2, train_step)")  # nothing is left to import
        shown(client, ENDLESS)
        began = time.monotonic()
        found = shown(
            client, "tp.check(2, train_step)", lambda said: STILL in said and client.parent.interrupt_kernel()
        )
        (still, text), (gone, empty), (_, interrupted) = found
        assert STILL in text and "Stop" in text and (gone, empty) == (still, "")
        assert "interrupted: the balise was not judged" in interrupted and time.monotonic() - began < 60
        shown(client, RIGHT + "\ncourse.LONG_S = 60.0")  # a busy machine is slow
        found = [text for _, text in shown(client, "tp.check(2, train_step)")]
        assert len(found) == 1 and found[0].startswith("★")


def test_the_line_does_not_stay_in_a_saved_notebook(tmp_path):
    cells = [nbformat.v4.new_code_cell(cell) for cell in (OPEN, SLOW, "tp.check(2, train_step)")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    heard = []
    client = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
    process = client.process_message
    client.process_message = lambda message, *rest: (heard.append(str(message["content"])), process(message, *rest))[1]
    client.execute()
    assert any(STILL in content for content in heard)
    saved = nbformat.writes(notebook)
    assert "still runs" not in saved and "★ balise 2" in saved


def test_a_plain_program_hears_no_such_line(monkeypatch, capsys):
    monkeypatch.setattr(course, "LONG_S", 0.0)
    monkeypatch.setattr(course, "judge", lambda *_: (time.sleep(0.2), course.Verdict(2, "t", "pass"))[1])
    course.Course(WORK, {}).check(2, abs)
    assert "still runs" not in capsys.readouterr().out


def test_an_endless_answer_gets_a_verdict():
    def endless(answer):
        yield "it ends"
        while answer:
            pass

    began = time.monotonic()
    assert verdict_of(endless, (True,), number=1, title="t", hints={}, deadline=1).slug == "endless"
    assert time.monotonic() - began < 30
    assert verdict_of.__kwdefaults__["deadline"] == 30
