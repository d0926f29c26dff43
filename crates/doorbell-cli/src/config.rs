//! From `--gpu`, `--hca-cores` and a port (RoCE's, or `verbs:` with an RDMA device) to the host library's settings; what is not given is left to
//! `DOORBELL_*` variables and defaults, which the library resolves. A port that a command would take by itself is such a default, so that
//! `DOORBELL_ROCE` and `DOORBELL_VERBS` say something everywhere.

use doorbell::{Config, HcaCores, Otherwise, Recorder, RoceWrap};

use crate::args::{DeviceArgs, PerfArgs};

/// A RoCE port, and an RDMA device.
fn apart(port: Option<&str>) -> (Option<String>, Option<String>) {
    match port {
        None => (None, None),
        Some(port) => match port.strip_prefix("verbs:") {
            Some(device) => (None, Some(device.to_owned())),
            None => (Some(port.to_owned()), None),
        },
    }
}

/// The host library's configuration: with the port that was named, or else the variables', or else the `usual` one.
pub(crate) fn of(args: &DeviceArgs, named: Option<&str>, usual: Option<&str>) -> Config {
    let ((roce, verbs), usual) = (apart(named), apart(usual));
    Config {
        gpu: args.gpu,
        hca_cores: args.hca_cores.map(|n| match n {
            0 => HcaCores::Caller,
            n => HcaCores::Threads(n),
        }),
        roce,
        verbs,
        otherwise: Otherwise {
            roce: usual.0,
            verbs: usual.1,
            ..Otherwise::default()
        },
        fault: args.fault.text(),
        ..Config::default()
    }
}

/// The same for `perf`, with what is put around its RoCE port.
pub(crate) fn of_perf(args: &PerfArgs, usual: Option<&str>) -> Config {
    let remote = &args.remote;
    Config {
        record: args.trace.as_ref().map(|_| Recorder::On(Recorder::TRACE)),
        roce_mtu: remote.mtu,
        roce_wrap: RoceWrap {
            pcap: remote.pcap.clone(),
            fault: remote.net_fault.clone(),
            trace: remote.trace_packets,
        },
        ..of(&args.device, args.link.port.as_deref(), usual)
    }
}
