//! What can go wrong with a device: which one, at which step, what the kernel said, and what to do about it.

use std::io;

/// An error of a verbs call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// The library is not there.
    #[error(
        "{path} cannot be loaded ({reason}): install rdma-core (Debian: libibverbs1 ibverbs-providers), or name the library with DOORBELL_IBVERBS"
    )]
    NoLibrary {
        /// What was tried.
        path: String,
        /// What the loader said.
        reason: String,
    },
    /// It is another library, or an old one.
    #[error("{path} has no function {symbol}: rdma-core 39 or later is needed")]
    Symbol {
        /// The library.
        path: String,
        /// The function.
        symbol: &'static str,
    },
    /// No device has that name.
    #[error(
        "there is no RDMA device{}; there {}: see `rdma link`; drivers that are loaded but list no device lack their provider (package ibverbs-providers)",
        quoted(name),
        list(found)
    )]
    NoDevice {
        /// What was asked for; empty: any.
        name: String,
        /// What there is.
        found: Vec<String>,
    },
    /// The device has no such port.
    #[error("RDMA device {device} has ports 1 to {ports}, port {port} was asked for")]
    NoPort {
        /// The device.
        device: String,
        /// What was asked for.
        port: u8,
        /// How many it has.
        ports: u8,
    },
    /// The port is not up.
    #[error(
        "port {port} of RDMA device {device} is {state}, not active: bring its network interface up (`ip link set … up`), or look at cable and switch"
    )]
    PortDown {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Its state.
        state: &'static str,
    },
    /// The port has no GID that fits.
    #[error(
        "port {port} of RDMA device {device} has no {wanted} among {seen} GIDs: give its network interface an IP address, or choose the index with ?gid=N (`rdma_topo`, show_gids, /sys/class/infiniband/{device}/ports/{port}/gids)"
    )]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// What was looked for.
        wanted: String,
        /// How many there are.
        seen: usize,
    },
    /// The device or its library cannot do that.
    #[error("RDMA device {device}: {what}")]
    Unsupported {
        /// The device.
        device: String,
        /// What, and what to do.
        what: String,
    },
    /// A call was refused.
    #[error("RDMA device {device}: {step}: {source}{remedy}")]
    Step {
        /// The device.
        device: String,
        /// What was tried.
        step: String,
        /// What the kernel said.
        source: io::Error,
        /// What to do about it; begins with a colon, or is empty.
        remedy: String,
    },
}

impl VerbsError {
    /// The device is gone, or answers nothing any more.
    pub fn is_gone(&self) -> bool {
        let Self::Step { source, .. } = self else {
            return false;
        };
        matches!(source.raw_os_error(), Some(libc::EIO | libc::ENODEV))
    }
}

/// Short for a result with [`VerbsError`].
pub type Result<T, E = VerbsError> = core::result::Result<T, E>;

fn quoted(name: &str) -> String {
    match name {
        "" => String::new(),
        name => format!(" {name:?}"),
    }
}

fn list(found: &[String]) -> String {
    match found {
        [] => "is none".to_owned(),
        [one] => format!("is {one}"),
        more => format!("are {}", more.join(", ")),
    }
}

/// What was being done when a call was refused: the remedy depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Open,
    Query,
    AllocPd,
    RegisterHost,
    RegisterGpu,
    RegisterDmabuf,
    CreateCq,
    CreateQp,
    CreateAh,
    ToInit,
    ToRtr,
    ToRts,
    Modify,
}

impl Step {
    fn words(self) -> &'static str {
        match self {
            Self::Open => "opening it",
            Self::Query => "asking for its properties",
            Self::AllocPd => "making a protection domain",
            Self::RegisterHost => "registering host memory",
            Self::RegisterGpu => "registering GPU memory by its address",
            Self::RegisterDmabuf => "registering GPU memory as a dma-buf",
            Self::CreateCq => "making a completion queue",
            Self::CreateQp => "making a queue pair",
            Self::CreateAh => "naming the peer's port (address handle)",
            Self::ToInit => "preparing a queue pair (INIT)",
            Self::ToRtr => "connecting a queue pair to its peer (RTR)",
            Self::ToRts => "connecting a queue pair to its peer (RTS)",
            Self::Modify => "changing a queue pair's state",
        }
    }

    /// `what`: what was tried, of this step.
    fn remedy(self, what: &str, errno: i32) -> String {
        let fixed = match (self, errno) {
            (Self::Open, libc::EACCES | libc::EPERM) => return rights(what),
            (Self::Open, libc::ENOENT | libc::ENODEV | libc::ENXIO) => {
                "its node under /dev/infiniband is missing: load ib_uverbs, and in a container pass --device=/dev/infiniband"
            }
            (
                Self::RegisterHost
                | Self::RegisterGpu
                | Self::AllocPd
                | Self::CreateCq
                | Self::CreateQp,
                libc::ENOMEM | libc::EAGAIN,
            ) => return memlock(),
            (Self::RegisterHost, libc::EFAULT) => {
                "the memory is not mapped, or it is read-only and the region grants writing"
            }
            (Self::RegisterGpu, libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP) => {
                "the kernel cannot give this NIC GPU memory: load nvidia-peermem, or use a kernel and driver with dma-buf (Linux 5.12, NVIDIA open modules 515); payloads in host memory work without"
            }
            (Self::RegisterDmabuf, libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::EINVAL) => {
                "its driver takes no dma-buf: load nvidia-peermem instead; payloads in host memory work without"
            }
            (Self::ToInit, libc::EINVAL) => {
                "the port has no such entry in its table of partition keys: choose one of /sys/class/infiniband/…/ports/…/pkeys with ?pkey=N"
            }
            (Self::CreateQp, libc::EINVAL) => {
                "the queue is deeper, or has more pieces or inline bytes, than the device takes"
            }
            (Self::ToRtr, libc::ETIMEDOUT) => {
                "the peer's address was not resolved: check with `ping` between the two RoCE interfaces, look for a firewall (UDP 4791) and for a VLAN, and choose another GID with ?gid=N"
            }
            (Self::ToRtr, libc::EHOSTUNREACH | libc::ENETUNREACH) => {
                "from that address of this port there is no way to that of the peer: give the port's network interface an address of the peer's network (`ip address add …`), or choose GIDs of one network on both sides (?gid=N; `doorbell info` shows the one that is used); fe80:: addresses reach the same wire only"
            }
            (Self::ToRtr, libc::EINVAL) => {
                "GID, path MTU or LID do not fit the port: both sides need GIDs of one kind (?gid=N), and a path MTU that both ports have (--mtu)"
            }
            (Self::CreateAh, libc::EINVAL | libc::ENXIO | libc::EHOSTUNREACH) => {
                "the peer's GID is none of this network's: both sides need EFA interfaces of one subnet and a security group that lets all traffic among itself pass"
            }
            (_, libc::EIO | libc::ENODEV) => "the device was removed or has failed: see dmesg",
            (_, libc::EPERM | libc::EACCES) => {
                "this user may not do that: see the permissions of /dev/infiniband/uverbs*"
            }
            _ => return String::new(),
        };
        format!(": {fixed}")
    }
}

/// Locked memory is what registration takes.
fn memlock() -> String {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let now = match limit {
        Some(bytes) => format!("{} KiB", bytes >> 10),
        None => "unlimited".to_owned(),
    };
    format!(
        ": memory that a NIC uses is locked, and this process may lock {now}: raise it (`ulimit -l unlimited`, LimitMEMLOCK=infinity of a service, --ulimit memlock=-1 of a container)"
    )
}

/// Why a node does not open: libibverbs looks elsewhere for one that it may not open, and then says that there is none.
pub(crate) fn why_closed(node: &str, errno: i32) -> i32 {
    use rustix::fs::{Access, access};
    match access(node, Access::READ_OK | Access::WRITE_OK) {
        Err(rustix::io::Errno::ACCESS) => libc::EACCES,
        _ => errno,
    }
}

/// Who may open a device's node, and how to become one of them.
fn rights(node: &str) -> String {
    use std::os::unix::fs::MetadataExt as _;
    let container = "in a container pass --device=/dev/infiniband, and --group-add for the group";
    let Ok(meta) = std::fs::metadata(node) else {
        return format!(
            ": this user may not open {node}: see `ls -l /dev/infiniband`; {container}"
        );
    };
    let (mode, group) = (meta.mode() & 0o777, group(meta.gid()));
    let remedy = match mode & 0o060 {
        0o060 => format!(
            "add this user to that group (`sudo usermod -aG {group} $USER`, then log in again)"
        ),
        _ => "its group may not either: packages of rdma-core bring the udev rules that let users in; or run as root".to_owned(),
    };
    format!(": {node} has group {group} and mode {mode:04o}: {remedy}; {container}")
}

/// The name of a group, or its number.
fn group(gid: u32) -> String {
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let named = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(gid)).then(|| name.to_owned())
    });
    named.unwrap_or_else(|| gid.to_string())
}

/// An error of `errno`; `what` is put behind the step.
pub(crate) fn refused(device: &str, step: Step, what: &str, errno: i32) -> VerbsError {
    VerbsError::Step {
        device: device.to_owned(),
        step: match what {
            "" => step.words().to_owned(),
            what => format!("{} ({what})", step.words()),
        },
        source: io::Error::from_raw_os_error(errno),
        remedy: step.remedy(what, errno),
    }
}

/// What the last call left in `errno`; a call that failed without saying why is an I/O error.
pub(crate) fn errno() -> i32 {
    match io::Error::last_os_error().raw_os_error() {
        Some(e) if e != 0 => e,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mistake_of_a_site_has_its_remedy() {
        for (step, errno, word) in [
            (Step::Open, libc::EACCES, "--device=/dev/infiniband"),
            (Step::RegisterHost, libc::ENOMEM, "ulimit -l"),
            (Step::RegisterGpu, libc::EFAULT, "nvidia-peermem"),
            (Step::RegisterDmabuf, libc::EOPNOTSUPP, "nvidia-peermem"),
            (Step::ToRtr, libc::ETIMEDOUT, "firewall"),
            (Step::ToRtr, libc::ENETUNREACH, "ip address add"),
            (Step::ToRtr, libc::EINVAL, "path MTU"),
            (Step::ToInit, libc::EINVAL, "?pkey=N"),
            (Step::CreateCq, libc::EIO, "removed"),
        ] {
            let text = refused("rxe0", step, "", errno).to_string();
            assert!(text.contains("rxe0") && text.contains(word), "{text}");
        }
        // What may not be opened is named with whom it belongs to.
        let text = refused("rxe0", Step::Open, "/dev/null", libc::EACCES).to_string();
        let belongs = "opening it (/dev/null): Permission denied (os error 13): /dev/null has group root and mode 0666: add this user to that group";
        assert!(text.contains(belongs), "{text}");
        // Nothing is invented where nothing is known.
        let text = refused("rxe0", Step::ToRts, "", libc::E2BIG).to_string();
        assert!(text.ends_with(')'), "{text}");
    }

    #[test]
    fn a_missing_device_says_what_there_is() {
        let text = |name: &str, found: &[&str]| {
            VerbsError::NoDevice {
                name: name.to_owned(),
                found: found.iter().map(|s| (*s).to_owned()).collect(),
            }
            .to_string()
        };
        assert!(text("", &[]).starts_with("there is no RDMA device; there is none: "));
        let text = text("mlx5_9", &["rxe0", "rxe1"]);
        assert!(
            text.contains("device \"mlx5_9\"; there are rxe0, rxe1"),
            "{text}"
        );
    }
}
