//! The exchanges of programs that know nothing of Doorbell: `ibv_rc_pingpong`, `ibv_uc_pingpong`, and perftest.
//!
//! Both are text over TCP port 18515, without versions that could be refused in words; what they carry is checked here as
//! anything a stranger sends. The peers use UDP port 4791, and so must the port of this side.

pub(crate) mod perftest;
pub(crate) mod pingpong;
mod socket;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};
use doorbell::Destination;
use doorbell::connect::{Agreed, Offer, RoceTarget, ip_of_gid};

pub(crate) use socket::{Listener, Socket};

/// UDP port of RoCEv2, which these programs do not negotiate.
pub(crate) const ROCE_PORT: u16 = 4791;

/// What the other side says of its queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Foreign {
    pub(crate) qpn: u32,
    pub(crate) psn: u32,
    pub(crate) gid: [u8; 16],
}

impl Foreign {
    /// The queue pair as something to connect to. `path_mtu` is what both sides were started with or agreed on.
    pub(crate) fn destination(
        &self,
        mine: &Offer,
        path_mtu: u16,
        unreliable: bool,
    ) -> Result<Destination> {
        let ip = ip_of_gid(self.gid);
        ensure!(
            !is_link_local(ip),
            "the other side uses the GID of {ip}: choose the one of an IPv4 or global IPv6 address there, with -g (`ibv_devinfo -v` lists them)"
        );
        let remote = Offer {
            address: SocketAddr::new(ip, ROCE_PORT),
            path_mtu,
            // What libibverbs' examples and perftest set up.
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
            ack_timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            segments: false,
            light: false,
            long: false,
        };
        let agreed: Agreed = mine
            .agree(&remote)
            .map_err(|refusal| anyhow::anyhow!("{refusal}"))?;
        ensure!(
            agreed.path_mtu == path_mtu,
            "the path MTU of {path_mtu} does not fit this side's port ({}): start both sides with a smaller one, with -m",
            mine.path_mtu
        );
        Ok(Destination::Roce(RoceTarget {
            agreed,
            qpn: self.qpn,
            psn: self.psn,
            unreliable,
        }))
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_unspecified(),
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.is_unspecified(),
    }
}

/// The RoCE port that these programs send to, at an address of this host. Processes of one user share it.
pub(crate) fn port_at(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => format!("udp://{ip}:{ROCE_PORT}?share"),
        IpAddr::V6(ip) => format!("udp://[{ip}]:{ROCE_PORT}?share"),
    }
}

/// A device error in words, with what to do where both sides were started differently.
pub(crate) fn explain(code: u64) -> String {
    use doorbell::Syndrome;
    use doorbell::device_api::{Error, Failure};
    let text = crate::device_error::words(code);
    match Error::from_code(code).map(|e| e.failure()) {
        Some(Failure::Completion { syndrome, .. })
            if [Syndrome::LOCAL_LENGTH, Syndrome::REMOTE_INVAL_REQ]
                .contains(&Syndrome(syndrome)) =>
        {
            format!("{text}; give both sides the same -s (--size)")
        }
        Some(Failure::Completion { syndrome, .. })
            if Syndrome(syndrome) == Syndrome::TRANSPORT_RETRY =>
        {
            format!(
                "{text}; look whether the other side runs, and with RoCE whether UDP port {ROCE_PORT} passes both ways in packets of that size"
            )
        }
        Some(Failure::TimedOut) => {
            format!(
                "{text}; look whether the other side is stopped or has ended, whether both were given the same -n and --uc (rc or uc), and whether UDP port {ROCE_PORT} passes both ways"
            )
        }
        _ => text,
    }
}

/// Hexadecimal digits of at most `bits` bits; an error names the field.
fn hex(text: &str, bits: u32, field: &str) -> Result<u64> {
    let value = (!text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit()))
        .then(|| u64::from_str_radix(text, 16).ok())
        .flatten()
        .filter(|v| bits >= 64 || v >> bits == 0);
    value.ok_or_else(|| {
        anyhow::anyhow!("its {field} is {text:?}, not {bits} bits in hexadecimal digits")
    })
}
