"""What a test server's ``/metrics`` holds."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import Server

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def scrape(server: Server) -> Samples:
    """Every sample of ``/metrics``: value by labels by name."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    """Sum of the samples that have ``labels``; 0 if there is none."""
    return sum(one for found, one in samples.get(name, {}).items() if labels.items() <= dict(found).items())
