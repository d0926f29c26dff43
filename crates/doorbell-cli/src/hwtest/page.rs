//! The results as lines to read.

use std::borrow::Borrow;
use std::fmt::Write;
use std::path::Path;

use doorbell_doctor::RdmaSystem;

use super::system::Host;
use super::{DeviceResult, LeftOut, Measured, Results, Step, is_stdout, measure, trial};

/// Where results are sent: to the repository, if this program knows where that is.
pub(super) fn where_to_send(json: &Path) -> String {
    let to = match env!("CARGO_PKG_REPOSITORY") {
        "" => "to whoever gave you this program, or as an issue of its repository".to_owned(),
        url => format!("to whoever gave you this program, or as an issue at {url}/issues"),
    };
    let json = match is_stdout(json) {
        true => "the JSON".into(),
        false => json.display().to_string(),
    };
    format!(
        "Please send {json} and the page, whatever they say, {to}, named after the NIC. Those two are all that is wanted."
    )
}

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

/// What was not tried.
pub(super) fn left_out(one: &LeftOut) -> String {
    format!("  left out {}: {}", one.what, one.why)
}

/// A measured case.
pub(super) fn row(row: &Measured) -> String {
    let Measured {
        to, outcome: row, ..
    } = row;
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
    if let Some(why) = &results.nothing {
        return match results
            .devices
            .iter()
            .any(|d| d.skipped.as_ref() == Some(why))
        {
            true => "nothing was tested, for the reason beside the device".to_owned(),
            false => format!("nothing was tested: {why}"),
        };
    }
    let (mut well, mut all) = (0, 0);
    let (mut well_there, mut all_there) = (0, 0);
    for device in &results.devices {
        let good = |steps: &[Step]| steps.iter().filter(|s| s.ok).count();
        let there = device.perf.iter().filter(|row| row.to.is_some()).count();
        let here = device.perf.len() - there;
        well += good(&device.steps) + here;
        all += device.steps.len() + here + device.failed.len();
        well_there += good(&device.to_peer) + there;
        all_there += device.to_peer.len() + there;
    }
    let mut text = match (all - well, all) {
        (0, 0) => "nothing was tested".to_owned(),
        (0, _) => format!("all {all} steps and measurements went well"),
        (bad, _) => format!("{bad} of {all} steps and measurements FAILED"),
    };
    if let Some(peer) = &results.peer {
        let name = &peer.name;
        let _ = match (&peer.why, all_there - well_there) {
            (Some(_), _) if all_there == 0 => write!(text, "; {}", peer.describe()),
            (None, 0) => write!(text, "; all {all_there} to {name} went well"),
            (Some(_), 0) => {
                let then = peer.describe();
                write!(text, "; all {all_there} to {name} went well, then {then}")
            }
            (_, bad) => write!(text, "; {bad} of {all_there} to {name} FAILED"),
        };
    }
    for missed in results.devices.iter().filter(|d| d.is_missed()) {
        let _ = write!(
            text,
            "; {} was asked for and NOT TESTED: {}",
            missed.port,
            missed.skipped.as_deref().unwrap_or("")
        );
    }
    if !results.complete {
        text.push_str("; it did not come to its end");
    }
    text
}

/// What a list may say of a device: no more than was tried.
fn what_went(results: &Results, device: &DeviceResult) -> String {
    let steps = device.steps.len();
    let measured = device.perf.iter().any(|row| row.to.is_none());
    let here = match (results.complete, device.steps.iter().all(|s| s.ok)) {
        (false, _) => format!("stopped after {steps} steps"),
        (true, false) => "not every step".to_owned(),
        (true, true) if steps < trial::STEPS => {
            format!("{steps} of {} steps, the others left out", trial::STEPS)
        }
        (true, true) if !device.failed.is_empty() => {
            format!("every step ({steps}), not every measurement")
        }
        (true, true) if !measured => format!("every step ({steps}), nothing measured"),
        (true, true) => "every step".to_owned(),
    };
    let Some(peer) = &results.peer else {
        return here;
    };
    let there = match (&peer.why, device.to_peer.iter().filter(|s| !s.ok).count()) {
        (Some(why), _) if device.to_peer.is_empty() => format!("not reached: {why}"),
        (_, 0) if device.to_peer.is_empty() => "nothing tried".to_owned(),
        (_, 0) if device.to_peer.len() < measure::STEPS => {
            format!("{} steps, the others left out", device.to_peer.len())
        }
        (_, 0) => format!("every step ({})", device.to_peer.len()),
        (_, bad) => format!("{bad} of {} steps failed", device.to_peer.len()),
    };
    // A line of a table.
    format!("{here}; to a second host: {}", there.replace('|', "/"))
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

fn known(text: Option<&str>) -> &str {
    text.filter(|t| !t.is_empty()).unwrap_or("unknown")
}

/// The host; what is likely to stand in the way first.
pub(super) fn host(host: &Host) -> Vec<String> {
    let gpu = match (&host.gpu, &host.gpu_why) {
        (Some(gpu), _) => format!("GPU {gpu}, driver {}", known(host.gpu_driver.as_deref())),
        (None, why) => format!("GPU none: {}", known(why.as_deref())),
    };
    let mut lines = vec![
        format!("memory that may be locked: {}", host.locking()),
        format!(
            "{}, {}, {} CPUs of {}",
            known(host.os.as_deref()),
            known(host.kernel.as_deref()),
            host.cpus,
            known(host.cpu.as_deref())
        ),
        format!("rdma-core {}", host.rdma_core),
        gpu,
    ];
    lines.extend(adapters(&host.rdma));
    lines
}

fn list<T: Borrow<str>>(words: &[T]) -> String {
    match words {
        [] => "none".to_owned(),
        words => words.join(" "),
    }
}

/// Network controllers, with what one lacks to be an RDMA device; and what of the RDMA software is there.
fn adapters(rdma: &RdmaSystem) -> Vec<String> {
    let mut lines: Vec<String> = rdma
        .adapters
        .iter()
        .map(|a| {
            let mut line = format!("network controller {} {} (board {})", a.pci, a.id, a.board);
            if let Some(name) = &a.name {
                let _ = write!(line, ", {name}");
            }
            let _ = write!(
                line,
                ": driver {}, interfaces {}, RDMA devices {}",
                a.driver.as_deref().unwrap_or("none"),
                list(&a.interfaces),
                list(&a.rdma)
            );
            if let Some(lacks) = &a.lacks {
                let _ = write!(line, "\n  {lacks}");
            }
            line
        })
        .collect();
    if lines.is_empty() {
        lines.push("network controllers on the PCI bus: none".to_owned());
    }
    lines.push(format!(
        "RDMA modules {}; providers of rdma-core {}",
        list(&rdma.modules),
        list(&rdma.providers)
    ));
    lines
}

/// A device's heading, with what is against it.
pub(super) fn device(device: &DeviceResult) -> String {
    let hardware = &device.hardware;
    let mut text = format!(
        "{}: driver {}, firmware {}, PCI {}",
        device.port,
        known(hardware.driver.as_deref()),
        known(Some(&device.firmware)),
        match (&hardware.address, &hardware.pci) {
            (Some(at), Some(id)) => format!("{id} at {at}"),
            (Some(one), None) | (None, Some(one)) => one.clone(),
            (None, None) => "none".to_owned(),
        }
    );
    if !device.link_layer.is_empty() {
        let _ = write!(
            text,
            ", {}, port {} at {}, path MTU {}, GID {}",
            device.link_layer,
            device.state,
            known(hardware.rate.as_deref()),
            device.mtu,
            device.gid.as_deref().unwrap_or("none")
        );
    }
    if let Some(why) = &device.skipped {
        let _ = write!(text, "\n  not tested: {why}");
    }
    text
}

/// The page.
pub(super) fn text(results: &Results) -> String {
    let mut page = format!(
        "Doorbell hardware test {}, {}: {}\n",
        results.version,
        results.started,
        verdict(results)
    );
    for line in host(&results.host) {
        let _ = writeln!(page, "{line}");
    }
    if let Some(peer) = &results.peer {
        let _ = writeln!(page, "{}", peer.describe());
    }
    for one in &results.devices {
        let _ = writeln!(page, "\n{}", device(one));
        for one in one.steps.iter().chain(&one.to_peer) {
            let _ = writeln!(page, "{}", step(one));
        }
        for one in &one.perf {
            let _ = writeln!(page, "{}", row(one));
        }
        for one in &one.failed {
            let _ = writeln!(page, "  FAILED  {}: {}", one.what, one.why);
        }
        for one in &one.left_out {
            let _ = writeln!(page, "{}", left_out(one));
        }
        if let Some(said) = &one.gpu_memory {
            let _ = writeln!(page, "  GPU memory: {said}");
        }
    }
    let tested: Vec<_> = results
        .devices
        .iter()
        .filter(|d| !d.steps.is_empty())
        .collect();
    if !tested.is_empty() {
        let _ = writeln!(page, "\nLines for HARDWARE.md, from what was found here:");
    }
    for device in tested {
        let _ = writeln!(page, "{}", line_of_the_list(results, device));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_without_its_rdma_driver_is_on_the_page() {
        let tree = doorbell_doctor::tree::Manifest::parse(
            "/sys/bus/pci/devices/0000:01:00.0/class: 0x020000\n/sys/bus/pci/devices/0000:01:00.0/vendor: 0x14e4\n/sys/bus/pci/devices/0000:01:00.0/device: 0x1750\n/sys/bus/pci/devices/0000:01:00.0/driver -> ../../drivers/bnxt_en\n",
        );
        let lines = adapters(&doorbell_doctor::rdma_system(&tree.expect("a machine")));
        assert_eq!(lines.len(), 2, "{lines:?}");
        for words in [
            "0000:01:00.0 14e4:1750",
            "driver bnxt_en",
            "\n  bnxt_re, which",
        ] {
            assert!(lines[0].contains(words), "{}", lines[0]);
        }
        assert!(lines[1].starts_with("RDMA modules none"), "{}", lines[1]);
        let none = adapters(&RdmaSystem::default());
        assert_eq!(none[0], "network controllers on the PCI bus: none");
    }
}
