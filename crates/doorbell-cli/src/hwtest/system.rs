//! What a reader of the results needs to know of the host and its devices, read from the kernel's own files; what cannot be read is absent.

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
    /// Bytes that this process may lock; absent: no limit.
    memlock: Option<u64>,
    pub(super) gpu: Option<String>,
    pub(super) gpu_driver: Option<String>,
    /// Kernel modules that give NICs GPU memory, of those that are loaded.
    gpu_memory_modules: Vec<&'static str>,
}

impl Host {
    pub(super) fn read() -> Self {
        let machine = Machine::read();
        let loaded = |name: &&str| Path::new("/sys/module").join(name).exists();
        Self {
            kernel: machine.kernel,
            os: file("/etc/os-release").as_deref().and_then(pretty_name),
            cpu: machine.cpu,
            cpus: machine.cpus,
            memlock: machine.memlock,
            gpu: gpu_name(),
            gpu_driver: crate::environment::nvidia_driver(),
            gpu_memory_modules: ["nvidia_peermem", "nv_peer_mem", "ib_peer_mem", "amdgpu"]
                .into_iter()
                .filter(loaded)
                .collect(),
        }
    }
}

fn gpu_name() -> Option<String> {
    let device = doorbell::Device::open().ok()?;
    device
        .gpu()
        .is_cuda()
        .then(|| device.gpu_info().name.clone())
}

/// What the kernel says of an RDMA device.
#[derive(Debug, Default, Serialize)]
pub(super) struct Hardware {
    /// Its kernel driver.
    pub(super) driver: Option<String>,
    /// PCI vendor and device, and those of the board.
    pub(super) pci: Option<String>,
    pub(super) board: Option<String>,
    /// Speed of the port, in the kernel's words.
    pub(super) rate: Option<String>,
    /// Its network interface.
    interface: Option<String>,
}

impl Hardware {
    pub(super) fn read(device: &str, port: u8) -> Self {
        Self::below(&Path::new("/sys/class/infiniband").join(device), port)
    }

    fn below(at: &Path, port: u8) -> Self {
        let word = |name: &str| file(at.join(name));
        let pci = ["vendor", "device", "subsystem_vendor", "subsystem_device"]
            .map(|name| word(&format!("device/{name}")));
        let link = std::fs::read_link(at.join("device/driver")).ok();
        Self {
            driver: link.and_then(|l| Some(l.file_name()?.to_string_lossy().into_owned())),
            pci: match pci {
                [Some(vendor), Some(device), Some(board_vendor), Some(board)] => {
                    Some(format!("{vendor}:{device} ({board_vendor}:{board})"))
                }
                _ => None,
            },
            board: word("board_id").or_else(|| word("hca_type")),
            rate: word(&format!("ports/{port}/rate")),
            interface: word(&format!("ports/{port}/gid_attrs/ndevs/0")),
        }
    }
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
    fn a_device_is_what_the_kernel_says_of_it() {
        let root = tempfile::tempdir().expect("a folder");
        let at = root.path();
        std::fs::create_dir_all(at.join("device")).expect("a folder");
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
        assert_eq!(seen.board.as_deref(), Some("BCM57508"));
        assert_eq!(seen.rate.as_deref(), Some("100 Gb/sec (4X EDR)"));
        // A device without a place on a bus, as soft-RoCE's.
        let none = Hardware::below(&at.join("nothing"), 1);
        assert!(none.driver.is_none() && none.pci.is_none() && none.rate.is_none());
        let name = pretty_name("NAME=x\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n");
        assert_eq!(name.as_deref(), Some("Debian GNU/Linux 12"));
    }
}
