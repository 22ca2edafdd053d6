"""Where a run's numbers go."""

import json

import pytest

from refusion_jax.training.metrics import METRICS_NAME, MetricsWriter, read_metrics


def record(step, loss=1.0):
    return {"step": step, "loss": loss, "tokens_per_second": 10.0}


def test_records_are_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, start_step=0, steps=10)
    assert writer.last == {}
    writer.write(record(2))
    assert read_metrics(tmp_path) == [record(2)]
    writer.write(record(4, loss=0.5))
    assert [json.loads(line) for line in (tmp_path / METRICS_NAME).read_text().splitlines()] == [
        record(2),
        record(4, loss=0.5),
    ]
    assert writer.last == record(4, loss=0.5)
    writer.close()


def test_a_run_that_continues_drops_the_records_of_lost_steps(tmp_path):
    lines = [json.dumps(record(step)) for step in (2, 4, 6, 8)]
    (tmp_path / METRICS_NAME).write_text("\n".join(lines) + '\n{"step": 10, "lo')
    writer = MetricsWriter(tmp_path, start_step=5, steps=10)
    assert writer.last == record(4)
    writer.write(record(6, loss=0.25))
    writer.close()
    assert read_metrics(tmp_path) == [record(2), record(4), record(6, loss=0.25)]


@pytest.mark.parametrize("text", [None, "", '{"step": 1'])
def test_no_records(text, tmp_path):
    if text is not None:
        (tmp_path / METRICS_NAME).write_text(text)
    assert read_metrics(tmp_path) == []
