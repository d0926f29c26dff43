//! From `--gpu`, `--hca-cores` and a RoCE port to the host library's settings; what is not given is left to
//! `DOORBELL_*` variables and defaults, which the library resolves.

use doorbell::{Config, HcaCores};

use crate::args::DeviceArgs;

/// The host library's configuration.
pub(crate) fn of(args: &DeviceArgs, roce: Option<&str>) -> Config {
    Config {
        gpu: args.gpu,
        hca_cores: args.hca_cores.map(|n| match n {
            0 => HcaCores::Caller,
            n => HcaCores::Threads(n),
        }),
        roce: roce.map(str::to_owned),
        ..Config::default()
    }
}
