//! What doctor says, as data: the schema of `doorbell doctor --json`.
//!
//! Within [`SCHEMA`] fields are added, never renamed or removed; whatever could not be read is `null`
//! or an empty list, never a guess. Sizes are bytes. docs/doctor.md explains every field.

use std::collections::BTreeMap;

use serde::Serialize;

/// The name and version that every report opens with.
pub const SCHEMA: &str = "doorbell-doctor/1";

/// Everything about one node.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// The sum, and the exit status that goes with it.
    pub verdict: Verdict,
    /// Kernel, processor, root or not.
    pub machine: Machine,
    /// Every GPU that the PCI bus shows.
    pub gpus: Vec<Gpu>,
    /// RDMA devices first, then other network adapters with hardware behind them.
    pub nics: Vec<Nic>,
    /// GPU by NIC: how far apart on the bus.
    pub distances: Vec<Distance>,
    /// NVIDIA's kernel driver and its options.
    pub driver: Option<Driver>,
    /// Ways for a NIC or a CPU to reach GPU memory.
    pub memory: Memory,
    /// Limits that RDMA and shared memory meet.
    pub limits: Limits,
    /// The container around us.
    pub container: Container,
    /// Libraries below all of them: libibverbs, libmlx5, libcuda, libgdrapi …
    pub software: Vec<Software>,
    /// NCCL, NVSHMEM, UCX, NIXL, DOCA: each installation with its paths.
    pub libraries: Vec<Library>,
    /// What Doorbell itself can do here.
    pub doorbell: Vec<Here>,
    /// What only root could have read.
    pub unseen: Vec<Unseen>,
    /// Variables of these libraries that are set.
    pub environment: BTreeMap<String, String>,
}

/// The sum of all libraries.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Every library that is installed takes a path on which the GPU drives the NIC.
    Native,
    /// At least one takes less than that.
    FallsBack,
    /// None of the libraries is installed.
    NothingInstalled,
}

impl Verdict {
    /// The exit status of `doorbell doctor`.
    pub fn status(self) -> u8 {
        match self {
            Self::Native => 0,
            Self::FallsBack => 1,
            Self::NothingInstalled => 4,
        }
    }
}

/// The host.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Machine {
    /// Kernel release, as `uname -r` gives it.
    pub kernel: Option<String>,
    /// Instruction set of the host.
    pub arch: Option<String>,
    /// Model name of the first processor.
    pub cpu: Option<String>,
    /// NUMA nodes.
    pub numa_nodes: usize,
    /// Doctor ran with CAP_SYS_ADMIN in effect.
    pub root: bool,
    /// Doctor ran with CAP_NET_RAW in effect.
    pub net_raw: bool,
    /// An IOMMU translates (the groups are not all identity mapped).
    pub iommu: Option<bool>,
    /// Modules of the RDMA subsystem that are loaded.
    pub rdma_modules: Vec<String>,
}

/// A GPU.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Gpu {
    /// PCI address.
    pub pci: String,
    /// Vendor's name.
    pub vendor: &'static str,
    /// Model, from the driver, else the PCI ids.
    pub name: String,
    /// `Hopper`, …; null when the id is not known here.
    pub architecture: Option<&'static str>,
    /// Lowest compute capability of that architecture, times ten (`90`).
    pub capability: Option<u32>,
    /// Kernel driver bound to it.
    pub driver: Option<String>,
    /// NUMA node.
    pub numa_node: Option<u32>,
}

/// A network controller on the PCI bus, whether or not anything drives it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Adapter {
    /// PCI address (`0000:3b:00.0`).
    pub pci: String,
    /// PCI vendor and device, hexadecimal (`14e4:1750`).
    pub id: String,
    /// Those of the board.
    pub board: String,
    /// Vendor and model, where the ids are known.
    pub name: Option<String>,
    /// Kernel driver; `None`: nothing drives it.
    pub driver: Option<String>,
    /// Network interfaces.
    pub interfaces: Vec<String>,
    /// RDMA devices that the kernel made of it.
    pub rdma: Vec<String>,
    /// What it lacks to be an RDMA device that can be used, and what to do, where its driver tells; `None`: nothing, or not known.
    pub lacks: Option<String>,
}

/// Network controllers, and what makes RDMA devices of them.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RdmaSystem {
    /// All network controllers on the PCI bus.
    pub adapters: Vec<Adapter>,
    /// Kernel modules of RDMA that are loaded.
    pub modules: Vec<&'static str>,
    /// Providers that rdma-core is told of (`/etc/libibverbs.d`).
    pub providers: Vec<String>,
}

/// A network adapter.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Nic {
    /// RDMA device (`mlx5_0`), else interface (`eth0`).
    pub name: String,
    /// It is an RDMA device.
    pub rdma: bool,
    /// Vendor's name.
    pub vendor: String,
    /// Model where the id is known, else the ids.
    pub model: String,
    /// Kernel driver: `mlx5_core`, `efa`, `bnxt_re`, `rdma_rxe`.
    pub driver: Option<String>,
    /// PCI address; null for software devices.
    pub pci: Option<String>,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Firmware version.
    pub firmware: Option<String>,
    /// `InfiniBand` or `Ethernet`.
    pub link_layer: Option<String>,
    /// State of port 1: `ACTIVE`, `DOWN` …
    pub state: Option<String>,
    /// Rate as the kernel words it.
    pub rate: Option<String>,
    /// Network interfaces of this device.
    pub interfaces: Vec<String>,
    /// `/dev/infiniband/uverbsN` is here (a container may not have it).
    pub verbs_node: Option<bool>,
}

/// How far a NIC is from a GPU, in the words of `nvidia-smi topo`.
#[derive(Clone, Debug, Serialize)]
pub struct Distance {
    /// PCI address.
    pub gpu: String,
    /// Name.
    pub nic: String,
    /// `PIX` one switch, `PXB` several, `PHB` one host bridge, `NODE` one NUMA node, `SYS` across.
    pub path: &'static str,
    /// A switch between them redirects to the host bridge (ACS); null when it could not be read.
    pub acs_redirect: Option<bool>,
}

/// NVIDIA's kernel driver.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Driver {
    /// Version of the kernel module.
    pub version: String,
    /// The open flavour.
    pub open: Option<bool>,
    /// Highest CUDA that this driver serves, from its branch.
    pub cuda: Option<String>,
    /// Version of the user-space library (libcuda), when one is found.
    pub libcuda: Option<String>,
    /// `PeerMappingOverride=1` is among the registry keys.
    pub peer_mapping_override: Option<bool>,
    /// `DmaRemapPeerMmio`.
    pub dma_remap_peer_mmio: Option<bool>,
    /// `GrdmaPciTopoCheckOverride`.
    pub grdma_topo_override: Option<u64>,
}

/// Ways to GPU memory.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Memory {
    /// nvidia_peermem is loaded.
    pub nvidia_peermem: bool,
    /// The older nv_peer_mem is loaded.
    pub nv_peer_mem: bool,
    /// EFA's own: efa_nv_peermem.
    pub efa_peermem: bool,
    /// The GPU's driver exports dma-bufs of CUDA memory (inferred from flavour, version, kernel, GPU).
    pub dma_buf: Option<bool>,
    /// Why that is thought.
    pub dma_buf_why: String,
    /// gdrdrv is loaded.
    pub gdrdrv: bool,
}

/// Limits; null is unlimited or unknown, as the field's text says.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Limits {
    /// Memory that may be locked; null: unlimited.
    pub memlock: Option<u64>,
    /// Size of /dev/shm; null: unknown.
    pub shm: Option<u64>,
    /// Huge pages of the default size that are reserved.
    pub hugepages: Option<u64>,
    /// The cgroup's memory limit; null: none.
    pub memory: Option<u64>,
    /// The cgroup's processor time in cores; null: none.
    pub cpus: Option<f64>,
}

/// The container.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Container {
    /// `docker`, `podman`, `kubernetes`, `lxc`, `apptainer` …; null outside.
    pub kind: Option<String>,
    /// What says so.
    pub why: Option<String>,
}

/// A library that others need.
#[derive(Clone, Debug, Serialize)]
pub struct Software {
    /// `libibverbs.so.1`.
    pub name: String,
    /// Where it is; null: not found.
    pub path: Option<String>,
    /// From the file's name.
    pub version: Option<String>,
}

/// One installation of a library and its verdict.
#[derive(Clone, Debug, Serialize)]
pub struct Library {
    /// `nccl`, `nvshmem`, `ucx`, `nixl`, `doca`.
    pub name: &'static str,
    /// The version, when it could be read without running anything.
    pub version: Option<String>,
    /// `wheel` or `system`.
    pub source: &'static str,
    /// The folder or file.
    pub path: String,
    /// Path that it will take here, as named in `paths`; null: none that starts at the GPU and none for it.
    pub takes: Option<&'static str>,
    /// Who drives the NIC on that path.
    pub who: Who,
    /// Paths that settings alone would open.
    pub could: Vec<&'static str>,
    /// Every path, best first, with its gates.
    pub paths: Vec<Path>,
    /// Things worth knowing that are no gate.
    pub notes: Vec<String>,
    /// Variables with a say in it.
    pub variables: Vec<Variable>,
}

/// Who builds work requests and rings the NIC.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum Who {
    /// Nothing reaches another node.
    Nobody,
    /// The host starts every transfer.
    Host,
    /// The GPU asks, a CPU thread rings or posts.
    Assisted,
    /// The GPU builds and rings.
    Native,
}

/// One way that a library can go.
#[derive(Clone, Debug, Serialize)]
pub struct Path {
    /// Its name in the library's own words.
    pub name: &'static str,
    /// Who drives the NIC on it.
    pub who: Who,
    /// Taken, open, waiting for a setting, blocked.
    pub state: PathState,
    /// What it needs.
    pub gates: Vec<Gate>,
}

/// Where a path stands.
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum PathState {
    /// The library will go this way.
    Taken,
    /// It could, but a better one is taken.
    Open,
    /// Only settings stand against it.
    Setting,
    /// Something of the node or the build stands against it.
    Blocked,
}

/// One condition.
#[derive(Clone, Debug, Serialize)]
pub struct Gate {
    /// What must hold.
    pub what: String,
    /// Does it?
    pub state: GateState,
    /// A variable or an option of the library, not a property of the node.
    pub setting: bool,
    /// What was found.
    pub found: String,
    /// What to do; empty when it holds.
    pub fix: String,
    /// Where the condition is written: a file of the library or its documentation.
    pub source: &'static str,
}

/// Does a gate hold?
#[derive(Clone, Copy, Debug, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum GateState {
    /// Yes.
    Pass,
    /// No.
    Fail,
    /// It cannot be told from files; taken as holding.
    Unknown,
}

/// A variable that decides.
#[derive(Clone, Debug, Serialize)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What it is set to; null: not set.
    pub value: Option<String>,
    /// What it does.
    pub effect: &'static str,
}

/// Something that Doorbell can or cannot do here.
#[derive(Clone, Debug, Serialize)]
pub struct Here {
    /// `software HCA`, `shared memory`, `RoCE over UDP`, `raw Ethernet`, `GPU kernels`.
    pub what: &'static str,
    /// It can.
    pub can: bool,
    /// Why, or what to do.
    pub why: String,
}

/// A fact that was not to be had.
#[derive(Clone, Debug, Serialize)]
pub struct Unseen {
    /// What.
    pub what: String,
    /// How to see it.
    pub how: String,
}
