"""Run with the package installed (or PYTHONPATH=python DOORBELL_COMMAND=...): python -m unittest discover python/tests"""

import dataclasses
import json
import tempfile
import unittest
from pathlib import Path

import doorbell
from doorbell._results import _options


class Options(unittest.TestCase):
    def test_names_lists_and_switches(self):
        self.assertEqual(
            _options({"size": [8, 64], "queue_mem": "host", "check": True, "quick": False, "json": None}),
            ["--size", "8,64", "--queue-mem", "host", "--check"],
        )


class Models(unittest.TestCase):
    def test_members_of_a_record_are_attributes_all_the_way_down(self):
        record = doorbell.Record({"a": {"b": [1, {"c": None}]}})
        self.assertEqual(record.a.b[0], 1)
        self.assertIsNone(record.a.b[1].c)
        self.assertEqual(record["a"]["b"][1].to_dict(), {"c": None})
        with self.assertRaisesRegex(AttributeError, "no 'x' here; there are a"):
            record.x
        with self.assertRaises(AttributeError):
            record.a = 1

    def test_what_a_newer_command_adds_is_there_and_what_it_lacks_is_none(self):
        point = doorbell.Point.from_dict(
            {"experiment": "sizes", "messages_per_s": {"median": 2.0, "min": 1.0, "max": 3.0}, "later": {"x": 1}}
        )
        self.assertEqual(point.messages_per_s, doorbell.Spread(median=2.0, min=1.0, max=3.0))
        self.assertIsNone(point.p50_ns)
        self.assertEqual(point.later.x, 1)
        with self.assertRaisesRegex(AttributeError, "Point has no 'never'"):
            point.never
        with self.assertRaises(dataclasses.FrozenInstanceError):
            point.size = 1

    def test_a_file_that_is_none_of_ours_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "x.json"
            file.write_text(json.dumps({"schema": "other/1"}))
            with self.assertRaisesRegex(ValueError, "other/1"):
                doorbell.load(file)


class Command(unittest.TestCase):
    def test_info_names_the_gpu(self):
        self.assertTrue(doorbell.info(gpu="host").to_dict())

    def test_doctor_judges_this_machine(self):
        report = doorbell.doctor()
        self.assertTrue(report.schema.startswith("doorbell-doctor/"))
        self.assertIn(report.verdict, ("native", "falls-back", "nothing-installed"))
        self.assertTrue(report.machine.kernel)
        for library in report.libraries:
            self.assertIn(library.who, ("native", "assisted", "host", "none"))
            for gate in (g for p in library.paths for g in p.gates):
                self.assertIn(gate.state, ("pass", "fail", "unknown"))

    def test_perf_checks_every_byte(self):
        report = doorbell.perf("put-bw", gpu="host", quick=True, check=True)
        self.assertTrue(report.schema.startswith("doorbell-perf/"))
        self.assertTrue(report.environment.kernel)
        self.assertTrue(report.results)
        for result in report.results:
            self.assertTrue(result.checked)
            self.assertGreater(result.messages, 0)

    def test_sweep_compare_and_files(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "sweep"
            sweep = doorbell.sweep(
                out=out, gpu="host", quick=True, only=["sizes", "latency"], links="loopback", sizes=[8, 64], repeat=2, secs=0.01
            )
            self.assertTrue(sweep.complete)
            self.assertEqual([p.size for p in sweep.of(experiment="sizes")], [8, 64])
            for point in sweep.points:
                self.assertEqual(len(point.repetitions), 2)
                figure = point.p50_ns if point.test.endswith("-lat") else point.messages_per_s
                self.assertLessEqual(figure.min, figure.median)
                self.assertLessEqual(figure.median, figure.max)
            self.assertTrue((out / "report.html").is_file())
            self.assertEqual(doorbell.load(out / "results.json"), sweep)
            same = doorbell.compare(sweep, out / "results.json")
            self.assertEqual((same.worse, same.better), (0, 0))
            self.assertEqual(same.same, len(same.figures))

    def test_a_sweep_whose_far_side_cannot_be_reached_is_not_complete(self):
        sweep = doorbell.sweep(
            gpu="host", only="sizes", links=["loopback", "roce"], connect="127.0.0.1:1", sizes=8, repeat=2, secs=0.01, timeout=60
        )
        self.assertFalse(sweep.complete)
        self.assertEqual(len(sweep.points), 1)

    def test_a_wrong_argument_says_what_was_wrong(self):
        with self.assertRaises(doorbell.DoorbellError) as caught:
            doorbell.perf("put-bw", blocks="none")
        self.assertEqual(caught.exception.status, 2)
        self.assertIn("none", str(caught.exception))
        with self.assertRaises(doorbell.DoorbellError):
            doorbell.sweep(only="nothing")

    def test_the_time_limit_ends_a_run(self):
        with self.assertRaises(doorbell.DoorbellError) as caught:
            doorbell.perf("put-bw", gpu="host", secs=30, timeout=0.2)
        self.assertIsNone(caught.exception.status)

    def test_the_library_and_its_header_are_there(self):
        self.assertTrue(doorbell.path("c").is_file())
        self.assertTrue((doorbell.path("include") / "doorbell.h").is_file())
        self.assertTrue((doorbell.path("ptx") / "doorbell.ptx").is_file())


if __name__ == "__main__":
    unittest.main()
