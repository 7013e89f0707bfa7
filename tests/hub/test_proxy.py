"""The hub's proxy holds as many open answers as a class can ask for."""

import subprocess
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.hub import conftest

CLASS = 40


def test_a_whole_class_waits_at_once(hub, folder):
    all_have_come = threading.Barrier(CLASS)

    class Patient(BaseHTTPRequestHandler):
        """Answers nobody before all have asked."""

        def do_GET(self):
            all_have_come.wait(60)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"ready")

        def log_message(self, *_):
            pass

    port = conftest.three_free_ports()
    course = folder / "course"
    command = [course / ".venv-hub" / "bin" / "python", course / "deploy" / "proxy.py", "--ip", "127.0.0.1"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Patient) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command += ["--port", str(port), "--api-ip", "127.0.0.1", "--api-port", str(port + 1)]
        command += ["--default-target", f"http://127.0.0.1:{server.server_port}"]
        proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            conftest.until_it_answers(f"http://127.0.0.1:{port}/_chp_healthz", proxy)
            with ThreadPoolExecutor(CLASS) as pool:
                found = list(pool.map(lambda _: ask(f"http://127.0.0.1:{port}/"), range(CLASS)))
        finally:
            all_have_come.abort()
            proxy.terminate()
            proxy.wait(20)
            server.shutdown()
    assert found == ["ready"] * CLASS


def ask(address: str) -> str:
    try:
        with urllib.request.urlopen(address, timeout=60) as reply:
            return reply.read().decode()
    except OSError as error:
        return str(error)
