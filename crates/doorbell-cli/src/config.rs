//! From `--gpu` and `--hca-cores` to the host library's settings; what is not given is left to
//! `DOORBELL_*` variables and defaults, which the library resolves.

use anyhow::Result;
use doorbell::{Config, GpuSelect, HcaCores};

use crate::args::DeviceArgs;

/// The host library's configuration.
pub(crate) fn resolve(args: &DeviceArgs) -> Result<Config> {
    Ok(Config {
        gpu: args
            .gpu
            .as_deref()
            .map(str::parse::<GpuSelect>)
            .transpose()?,
        hca_cores: args.hca_cores.map(|n| match n {
            0 => HcaCores::Caller,
            n => HcaCores::Threads(n),
        }),
        ..Config::default()
    })
}
