//! The results as lines to read.

use std::fmt::Write;

use super::trial::Step;
use super::{DeviceResult, Measured, Results};

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
pub(super) fn row(row: &Measured) -> String {
    let Measured { to, outcome: row } = row;
    let mut line = format!("  ok      {} {} {} B", row.test, row.sharing, row.size);
    if row.gpu != "host" {
        let _ = write!(line, ", posted by {}", row.gpu);
    }
    if let Some(to) = to {
        let _ = write!(line, " to {to}");
    }
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

/// How it went, in a line.
pub(super) fn verdict(results: &Results) -> String {
    let (mut well, mut all) = (0, 0);
    for device in &results.devices {
        let good = device.steps.iter().filter(|s| s.ok).count();
        well += good + device.perf.len();
        all += device.steps.len() + device.perf.len() + device.failed.len();
    }
    let end = match results.complete {
        true => "",
        false => "; it did not come to its end",
    };
    match (all - well, all) {
        (0, 0) => format!("nothing was tested{end}"),
        (0, _) => format!("all {all} steps and measurements went well{end}"),
        (bad, _) => format!("{bad} of {all} steps and measurements FAILED{end}"),
    }
}

/// What a list may say of a device: no more than was tried.
fn what_went(results: &Results, device: &DeviceResult) -> String {
    let steps = device.steps.len();
    match (results.complete, device.is_well()) {
        (false, _) => format!("stopped after {steps} steps"),
        (true, false) => "not every step".to_owned(),
        (true, true) if device.perf.is_empty() => {
            format!("every step ({steps}), nothing measured")
        }
        (true, true) => "every step".to_owned(),
    }
}

/// The device's line for HARDWARE.md.
fn line_of_the_list(results: &Results, device: &DeviceResult) -> String {
    let dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "–".to_owned());
    let nic = match (&device.hardware.board, &device.hardware.pci) {
        (Some(board), Some(pci)) => format!("{board}, {pci}"),
        (Some(one), None) | (None, Some(one)) => one.clone(),
        (None, None) => device.port.clone(),
    };
    let drivers = [&device.hardware.driver, &results.host.gpu_driver];
    let drivers: Vec<&str> = drivers.into_iter().flatten().map(String::as_str).collect();
    let drivers = (!drivers.is_empty()).then(|| drivers.join(", "));
    format!(
        "| {nic} | {} | {} | {} | verbs: {} | {} |",
        device.firmware,
        dash(&results.host.gpu),
        dash(&drivers),
        what_went(results, device),
        results.started.split('T').next().unwrap_or("")
    )
}

/// The page.
pub(super) fn text(results: &Results) -> String {
    let mut page = String::new();
    let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
    let host = &results.host;
    let _ = writeln!(
        page,
        "Doorbell hardware test {}, {}: {}",
        results.version,
        results.started,
        verdict(results)
    );
    let _ = writeln!(
        page,
        "{}, {}, {} CPUs of {}",
        or(&host.os),
        or(&host.kernel),
        host.cpus,
        or(&host.cpu)
    );
    let _ = writeln!(
        page,
        "GPU {}, driver {}",
        host.gpu.as_deref().unwrap_or("none"),
        host.gpu_driver.as_deref().unwrap_or("none")
    );
    for (device, why) in &results.refused {
        let _ = writeln!(page, "{device}: cannot be opened: {why}");
    }
    for device in &results.devices {
        let _ = writeln!(
            page,
            "\n{}: {}, driver {}, firmware {}, PCI {}, port {} at {}, path MTU {}, GID {}",
            device.port,
            device.link_layer,
            or(&device.hardware.driver),
            device.firmware,
            device.hardware.pci.as_deref().unwrap_or("none"),
            device.state,
            or(&device.hardware.rate),
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
        if let Some(said) = &device.gpu_memory {
            let _ = writeln!(page, "  GPU memory: {said}");
        }
    }
    let _ = writeln!(page, "\nLines for HARDWARE.md, from what was found here:");
    for device in &results.devices {
        let _ = writeln!(page, "{}", line_of_the_list(results, device));
    }
    page
}
