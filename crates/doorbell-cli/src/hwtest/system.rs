//! What a reader of the results needs to know of the host and its devices, read from the kernel's own files; what cannot be read is null.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use crate::environment::Machine;

/// The host.
#[derive(Debug, Serialize)]
pub(super) struct Host {
    pub(super) kernel: Option<String>,
    /// The distribution, in its own words.
    pub(super) os: Option<String>,
    pub(super) cpu: Option<String>,
    pub(super) cpus: u64,
    /// Bytes that this process may lock; null: no limit.
    memlock: Option<u64>,
    /// It may lock more than its limit, by the capability for that.
    locks_any: bool,
    /// The release of rdma-core; `unknown` if its library does not say it.
    pub(super) rdma_core: String,
    /// libibverbs, or why there is none.
    library: Library,
    pub(super) gpu: Option<String>,
    /// Why there is none that is used.
    pub(super) gpu_why: Option<String>,
    pub(super) gpu_driver: Option<String>,
    /// Kernel modules that give NICs GPU memory, of those that are loaded.
    gpu_memory_modules: Vec<&'static str>,
    /// Variables of this program's own that are in force.
    variables: BTreeMap<String, String>,
    /// Network controllers on the PCI bus, driven or not, and what of the RDMA software is there.
    pub(super) rdma: doorbell_doctor::RdmaSystem,
}

/// libibverbs.
#[derive(Debug, Serialize)]
pub(super) struct Library {
    file: Option<String>,
    release: Option<String>,
    missing: Option<String>,
}

impl Library {
    pub(super) fn of(rdma: &doorbell::Rdma) -> Self {
        Self {
            file: rdma.library.as_ref().map(|f| f.display().to_string()),
            release: rdma.release.clone(),
            missing: None,
        }
    }

    pub(super) fn missing(why: &str) -> Self {
        Self {
            file: None,
            release: None,
            missing: Some(why.to_owned()),
        }
    }

    /// Why it cannot be used, if that is so.
    pub(super) fn why(&self) -> Option<&str> {
        self.missing.as_deref()
    }
}

/// Memory that the test locks, with room for what devices lock of their own.
const LOCKED: u64 = 64 << 20;
/// `CAP_IPC_LOCK`, by its number.
const IPC_LOCK: u64 = 1 << 14;

/// Lets this process, and those that it starts, lock what they may ask for without rights.
pub(super) fn raise_memlock() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Memlock);
    if current != maximum {
        // One that may not be raised stays, and is told.
        let _ = setrlimit(
            Resource::Memlock,
            Rlimit {
                current: maximum,
                maximum,
            },
        );
    }
}

/// Does a limit on locked memory mean nothing to this process?
fn locks_any(status: &str) -> bool {
    let bits = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
    bits.and_then(|b| u64::from_str_radix(b.trim(), 16).ok())
        .is_some_and(|b| b & IPC_LOCK != 0)
}

impl Host {
    /// What it may lock, and what to do if that is too little.
    pub(super) fn locking(&self) -> String {
        match self.memlock {
            _ if self.locks_any => "any (CAP_IPC_LOCK)".to_owned(),
            None => "any".to_owned(),
            Some(bytes) if bytes >= LOCKED => crate::units::size(bytes),
            Some(bytes) => format!(
                "{}, which is TOO LITTLE (registering memory will fail): `ulimit -l unlimited` as root before the test, `memlock` in /etc/security/limits.conf, --ulimit memlock=-1 of a container",
                crate::units::size(bytes)
            ),
        }
    }

    pub(super) fn read(library: Library) -> Self {
        let machine = Machine::read();
        let gpu = gpu();
        let loaded = |name: &&str| Path::new("/sys/module").join(name).exists();
        Self {
            kernel: machine.kernel,
            os: file("/etc/os-release").as_deref().and_then(pretty_name),
            cpu: machine.cpu,
            cpus: machine.cpus,
            memlock: machine.memlock,
            locks_any: locks_any(&std::fs::read_to_string("/proc/self/status").unwrap_or_default()),
            rdma_core: library
                .release
                .clone()
                .unwrap_or_else(|| "unknown".to_owned()),
            library,
            gpu_why: gpu.as_ref().err().cloned(),
            gpu: gpu.ok(),
            gpu_driver: crate::environment::nvidia_driver(),
            gpu_memory_modules: ["nvidia_peermem", "nv_peer_mem", "ib_peer_mem", "amdgpu"]
                .into_iter()
                .filter(loaded)
                .collect(),
            variables: std::env::vars_os()
                .map(|(name, value)| {
                    (
                        name.to_string_lossy().into_owned(),
                        value.to_string_lossy().into_owned(),
                    )
                })
                .filter(|(name, value)| name.starts_with("DOORBELL_") && !value.is_empty())
                .collect(),
            rdma: doorbell_doctor::rdma_system(&doorbell_doctor::tree::Live::here()),
        }
    }
}

/// The GPU that is used, or why there is none.
fn gpu() -> Result<String, String> {
    let device = doorbell::Device::open().map_err(|e| e.to_string())?;
    let info = device.gpu_info();
    match device.gpu().is_cuda() {
        true => Ok(info.name.clone()),
        false => Err(info.notes.join("; ")),
    }
}

/// What the kernel says of an RDMA device.
#[derive(Debug, Default, Serialize)]
pub(super) struct Hardware {
    /// Its kernel driver.
    pub(super) driver: Option<String>,
    /// PCI vendor and device, and those of the board.
    pub(super) pci: Option<String>,
    /// Where it is on the bus.
    pub(super) address: Option<String>,
    pub(super) board: Option<String>,
    /// Speed of the port, in the kernel's words.
    pub(super) rate: Option<String>,
    /// Its network interface.
    interface: Option<String>,
    #[serde(skip)]
    firmware: Option<String>,
}

impl Hardware {
    pub(super) fn read(device: &str, port: u8) -> Self {
        Self::below(&Path::new("/sys/class/infiniband").join(device), port)
    }

    /// As the kernel says it, where the device itself cannot be asked.
    pub(super) fn firmware(&self) -> Option<String> {
        self.firmware.clone()
    }

    /// The RDMA devices that the kernel has.
    pub(super) fn names() -> Vec<String> {
        let listed = std::fs::read_dir("/sys/class/infiniband")
            .into_iter()
            .flatten();
        let names = listed.filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned()));
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    fn below(at: &Path, port: u8) -> Self {
        let word = |name: &str| file(at.join(name));
        let pci = ["vendor", "device", "subsystem_vendor", "subsystem_device"]
            .map(|name| word(&format!("device/{name}")));
        let link = std::fs::read_link(at.join("device/driver")).ok();
        let real = std::fs::canonicalize(at.join("device")).ok();
        // A device of another bus (an auxiliary one) stands on one of PCI.
        let address = real.as_deref().and_then(|real| {
            let mut names = real.ancestors().filter_map(Path::file_name);
            names.find_map(|n| {
                Some(n.to_str()?)
                    .filter(|n| is_pci_address(n))
                    .map(str::to_owned)
            })
        });
        Self {
            driver: link.and_then(|l| Some(l.file_name()?.to_string_lossy().into_owned())),
            pci: match pci {
                [Some(vendor), Some(device), Some(board_vendor), Some(board)] => {
                    Some(format!("{vendor}:{device} ({board_vendor}:{board})"))
                }
                _ => None,
            },
            address,
            board: word("board_id").or_else(|| word("hca_type")),
            rate: word(&format!("ports/{port}/rate")),
            interface: word(&format!("ports/{port}/gid_attrs/ndevs/0")),
            firmware: word("fw_ver"),
        }
    }
}

/// As `0000:3b:00.0`.
fn is_pci_address(name: &str) -> bool {
    let hex = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    let parts: Vec<&str> = name.split([':', '.']).collect();
    parts.len() == 4 && name.matches(':').count() == 2 && parts.into_iter().all(hex)
}

fn file(path: impl AsRef<Path>) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

fn pretty_name(os_release: &str) -> Option<String> {
    let line = os_release
        .lines()
        .find_map(|l| l.strip_prefix("PRETTY_NAME="))?;
    Some(line.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_lock_anything_is_known_by_its_capability() {
        assert!(locks_any("Name:\tx\nCapEff:\t000001fffeffffff\n"));
        assert!(!locks_any("CapEff:\t0000000000000000\n"));
        assert!(!locks_any(""));
    }

    #[test]
    fn a_device_is_what_the_kernel_says_of_it() {
        let root = tempfile::tempdir().expect("a folder");
        let at = root.path();
        let bus = tempfile::tempdir().expect("a folder");
        let device = bus.path().join("0000:3b:00.0/bnxt_en.rdma.0");
        std::fs::create_dir_all(&device).expect("a folder");
        std::os::unix::fs::symlink(&device, at.join("device")).expect("a link");
        std::fs::create_dir_all(at.join("ports/1")).expect("a folder");
        for (name, text) in [
            ("device/vendor", "0x14e4\n"),
            ("device/device", "0x1750\n"),
            ("device/subsystem_vendor", "0x14e4\n"),
            ("device/subsystem_device", "0x5208\n"),
            ("hca_type", "BCM57508\n"),
            ("ports/1/rate", "100 Gb/sec (4X EDR)\n"),
        ] {
            std::fs::write(at.join(name), text).expect("a file");
        }
        std::os::unix::fs::symlink("../drivers/bnxt_en", at.join("device/driver")).expect("a link");
        let seen = Hardware::below(at, 1);
        assert_eq!(seen.driver.as_deref(), Some("bnxt_en"));
        assert_eq!(seen.pci.as_deref(), Some("0x14e4:0x1750 (0x14e4:0x5208)"));
        assert_eq!(seen.address.as_deref(), Some("0000:3b:00.0"));
        assert_eq!(seen.board.as_deref(), Some("BCM57508"));
        assert_eq!(seen.rate.as_deref(), Some("100 Gb/sec (4X EDR)"));
        // A device without a place on a bus, as soft-RoCE's.
        let none = Hardware::below(&at.join("nothing"), 1);
        assert!(none.driver.is_none() && none.pci.is_none() && none.rate.is_none());
        let name = pretty_name("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n");
        assert_eq!(name.as_deref(), Some("Debian GNU/Linux 12"));
    }
}
