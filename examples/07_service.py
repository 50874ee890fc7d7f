"""Score streams behind HTTP, with memory that does not grow, and four clients at a time.

Motors hum, and hum faster once a bearing breaks. Each sends its readings to a service, which
answers how likely it is that the bearing has broken. The server is that of Python itself.

The trap: a service runs for months, and a model that keeps all it has seen outgrows the memory;
resonator blocks have a state of fixed size. And of threads only one at a time may move a stream.

Run `python examples/07_service.py`. Expect a minute on a CPU, and answers as for whole series.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import Tensor, nn
from torch.nn import functional

from osciformer import OnlineSession, OsciFormer

SEED, HUM, SPAN, NUM_READINGS = 0, (1.0, 3.0), 40.0, 50
MOST_STREAMS = 1000  # a client that invents names must not fill the memory


def run_motors(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return times and readings [B, N], and the moment [B, 1] at which the bearing breaks."""
    times = SPAN * torch.rand(batch, NUM_READINGS, generator=generator).sort(dim=1).values
    breaks = SPAN * (0.3 + 0.4 * torch.rand(batch, 1, generator=generator))
    after = (times - breaks).clamp(min=0)
    return times, torch.sin(HUM[0] * (times - after) + HUM[1] * after), breaks


def train(steps: int, dim: int, generator: torch.Generator) -> nn.ModuleDict:
    """Return a backbone of resonator blocks, and a head."""
    backbone = OsciFormer(1, dim=dim, num_heads=2, blocks=("resonator", "resonator"))
    backbone.fit_time_scale(run_motors(256, generator)[0])
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(dim, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        times, readings, breaks = run_motors(32, generator)
        logits = model["head"](backbone(readings[..., None], times).states)[..., 0]
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(logits, (times > breaks).float()).backward()
        optimizer.step()
    return model.eval()


class Service(ThreadingHTTPServer):
    """Sessions by the name of their stream; the state of each is of a fixed size."""

    def __init__(self, model: nn.ModuleDict) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.sessions, self.lock = model, {}, threading.Lock()

    def score(self, stream: str, at: float, values: list[float]) -> float:
        """Add a reading to a stream, and return the probability."""
        with self.lock:  # two threads must not both begin a stream
            if stream not in self.sessions:
                if len(self.sessions) >= MOST_STREAMS:
                    raise ValueError(f"there are {MOST_STREAMS} streams already")
                self.sessions[stream] = OnlineSession(self.model["backbone"])
        state = self.sessions[stream].observe(at, torch.tensor([values]))  # a step at a time
        with torch.no_grad():
            return float(self.model["head"](state).sigmoid())


class Handler(BaseHTTPRequestHandler):
    """POST {"stream": "m1", "time": 3.5, "values": [0.2]} gives {"probability": 0.01}."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    log_message = lambda *_: None  # noqa: E731

    def do_POST(self) -> None:
        """Score a reading, or say what is wrong with it."""
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = str(asked["stream"]), float(asked["time"]), asked["values"]
            code, answer = 200, {"probability": self.server.score(*given)}
        except (KeyError, TypeError, ValueError) as error:
            code, answer = 400, {"error": str(error)}
        self.send_response(code)
        self.send_header("Content-Length", str(len(body := json.dumps(answer).encode())))
        self.end_headers()
        self.wfile.write(body)


def send(port: int, stream: str, times: Tensor, readings: Tensor) -> list[float]:
    """Send the readings of one motor, and return the answers."""
    connection, found = HTTPConnection("127.0.0.1", port), []
    for t, x in zip(times.tolist(), readings.tolist(), strict=True):
        connection.request("POST", "/", json.dumps({"stream": stream, "time": t, "values": [x]}))
        found.append(json.loads(connection.getresponse().read())["probability"])
    connection.close()
    return found


def main(steps=200, num_motors=8, dim=16) -> dict[str, float]:
    model = train(steps, dim, torch.manual_seed(SEED))
    times, readings, _ = run_motors(num_motors, torch.Generator().manual_seed(SEED + 1))
    with torch.no_grad():
        whole = model["head"](model["backbone"](readings[..., None], times).states).sigmoid()
    with Service(model) as service, ThreadPoolExecutor(4) as clients:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        ports, names = [service.server_port] * num_motors, [f"m{k}" for k in range(num_motors)]
        found = torch.tensor(list(clients.map(send, ports, names, times, readings)))
        held = max(session.num_held for session in service.sessions.values())
        service.shutdown()
    difference = float((found - whole[..., 0]).abs().max())
    print(f"{num_motors} motors; {held} observations held; largest difference {difference:.1e}")
    return {"difference": difference, "held": float(held)}


if __name__ == "__main__":
    main()
