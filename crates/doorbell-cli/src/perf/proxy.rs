//! `--initiator proxy`: kernels write commands, CPU threads of this process post them.
//! The baseline that GPU-initiated posting is compared with; the host library has the threads.

use anyhow::Result;
use doorbell::{Proxy, ProxyConfig, Qp};
use doorbell_kernels::params;
use doorbell_kernels::params::Area;

use super::bench::Bench;
use super::plan::Case;
use super::side::{Reach, Side};

/// Starts the threads: one for a caller-driven engine (which they run too), else as many as the
/// engine has.
pub(crate) fn start(
    bench: &Bench,
    qps: &[Qp],
    case: &Case,
    near: &Side,
    far: &Reach,
) -> Result<Proxy> {
    let all: Vec<&Qp> = qps.iter().collect();
    let config = ProxyConfig {
        depth: case.depth.max(32),
        threads: bench.cores().max(1) as usize,
        cpus: Vec::new(),
        local_key: near.reach().key,
        remote_key: far.key,
    };
    Ok(Proxy::start(&bench.device, &all, &config)?)
}

/// What the kernel takes.
pub(crate) fn params(
    proxy: &Proxy,
    near: &Area,
    far: &Area,
    size: u64,
    iters: u64,
    rest: impl FnOnce(&mut params::Proxy),
) -> params::Proxy {
    let mut params = params::Proxy {
        ring: 0,
        pi: 0,
        ci_cache: 0,
        ci: 0,
        queues: 0,
        depth: 0,
        iters,
        deadline_ns: 0,
        size,
        local: near.addr,
        remote: far.addr,
        stride: near.stride,
        mask: near.mask.into(),
        status: 0,
        run_ns: 0,
    };
    proxy.fill(&mut params);
    rest(&mut params);
    params
}
