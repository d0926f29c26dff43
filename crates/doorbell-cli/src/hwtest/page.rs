//! The results as lines to read.

use std::fmt::Write;

use super::Results;
use super::trial::Step;
use crate::schema::Outcome;

/// A step of correctness.
pub(super) fn step(step: &Step) -> String {
    format!(
        "  {}  {}: {} ({} ms)",
        if step.ok { "ok    " } else { "FAILED" },
        step.name,
        step.said,
        step.millis
    )
}

/// A measured case.
pub(super) fn row(row: &Outcome) -> String {
    let mut line = format!("  ok      {} {} {} B", row.test, row.sharing, row.size);
    if let Some(rate) = row.messages_per_s {
        let _ = write!(line, ", {} messages/s", crate::units::grouped(rate as u64));
    }
    if let Some(rate) = row.bytes_per_s {
        let _ = write!(line, ", {} B/s", crate::units::grouped(rate as u64));
    }
    if let Some(latency) = &row.latency_ns {
        let _ = write!(line, ", median {:.2} us", latency.p50 as f64 / 1e3);
    }
    line
}

/// The page.
pub(super) fn text(results: &Results) -> String {
    let mut page = String::new();
    let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
    let _ = writeln!(
        page,
        "Doorbell hardware test {}, {}",
        results.version, results.started
    );
    let _ = writeln!(page, "kernel {}, {}", or(&results.kernel), or(&results.cpu));
    let _ = writeln!(
        page,
        "GPU {}, driver {}",
        results.gpu.as_deref().unwrap_or("none"),
        results.gpu_driver.as_deref().unwrap_or("none")
    );
    for (device, why) in &results.refused {
        let _ = writeln!(page, "{device}: cannot be opened: {why}");
    }
    for device in &results.devices {
        let _ = writeln!(
            page,
            "\n{}: {}, firmware {}, vendor {}, port {}, path MTU {}, GID {}",
            device.port,
            device.link_layer,
            device.firmware,
            device.vendor,
            device.state,
            device.mtu,
            device.gid.as_deref().unwrap_or("none")
        );
        for one in &device.steps {
            let _ = writeln!(page, "{}", step(one));
        }
        for one in &device.perf {
            let _ = writeln!(page, "{}", row(one));
        }
        for one in &device.failed {
            let _ = writeln!(page, "  FAILED  {one}");
        }
    }
    page
}
