"""Run with the package installed (or PYTHONPATH=python DOORBELL_COMMAND=...): python -m unittest discover python/tests"""

import unittest

import doorbell
from doorbell._results import _options


class Options(unittest.TestCase):
    def test_names_lists_and_switches(self):
        self.assertEqual(
            _options({"size": [8, 64], "queue_mem": "host", "check": True, "quick": False, "json": None}),
            ["--size", "8,64", "--queue-mem", "host", "--check"],
        )


class Records(unittest.TestCase):
    def test_members_are_attributes_all_the_way_down(self):
        record = doorbell.Record({"a": {"b": [1, {"c": None}]}})
        self.assertEqual(record.a.b[0], 1)
        self.assertIsNone(record.a.b[1].c)
        self.assertEqual(record["a"]["b"][1].to_dict(), {"c": None})
        with self.assertRaisesRegex(AttributeError, "no 'x' here; there are a"):
            record.x
        with self.assertRaises(AttributeError):
            record.a = 1


class Command(unittest.TestCase):
    def test_info_names_the_gpu(self):
        self.assertTrue(doorbell.info(gpu="host").to_dict())

    def test_perf_checks_every_byte(self):
        report = doorbell.perf("put-bw", gpu="host", quick=True, check=True)
        self.assertTrue(report.schema.startswith("doorbell-perf/"))
        self.assertTrue(report.results)
        for result in report.results:
            self.assertTrue(result.checked)
            self.assertGreater(result.messages, 0)

    def test_a_wrong_argument_says_what_was_wrong(self):
        with self.assertRaises(doorbell.DoorbellError) as caught:
            doorbell.perf("put-bw", blocks="none")
        self.assertEqual(caught.exception.status, 2)
        self.assertIn("none", str(caught.exception))

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
