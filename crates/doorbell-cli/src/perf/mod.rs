//! `doorbell perf`: plan the cases, run each on queues of its own, check, report.

mod check;
mod plan;
mod report;
