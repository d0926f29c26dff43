//! From `--gpu`, `--hca-cores` and a port (RoCE's, or `verbs:` with an RDMA device) to the host library's settings; what is not given is left to
//! `DOORBELL_*` variables and defaults, which the library resolves.

use doorbell::{Config, HcaCores, Recorder, RoceWrap};

use crate::args::{DeviceArgs, PerfArgs};

/// The host library's configuration.
pub(crate) fn of(args: &DeviceArgs, port: Option<&str>) -> Config {
    let verbs = port.and_then(|p| p.strip_prefix("verbs:"));
    let roce = port.filter(|_| verbs.is_none());
    Config {
        gpu: args.gpu,
        hca_cores: args.hca_cores.map(|n| match n {
            0 => HcaCores::Caller,
            n => HcaCores::Threads(n),
        }),
        roce: roce.map(str::to_owned),
        verbs: verbs.map(str::to_owned),
        fault: args.fault.text(),
        ..Config::default()
    }
}

/// The same for `perf`, with what is put around its RoCE port.
pub(crate) fn of_perf(args: &PerfArgs, port: Option<&str>) -> Config {
    let remote = &args.remote;
    Config {
        record: args.trace.as_ref().map(|_| Recorder::On(Recorder::TRACE)),
        roce_mtu: remote.mtu,
        roce_wrap: RoceWrap {
            pcap: remote.pcap.clone(),
            fault: remote.net_fault.clone(),
            trace: remote.trace_packets,
        },
        ..of(&args.device, port)
    }
}
