//! What a caller says: which GPU, which kernels, how large a launch, which memory.
//!
//! Plain values without behaviour beyond parsing and printing; the back ends interpret them.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use doorbell_device::host::HostKernel;

use crate::GpuError;

/// Which GPU to open.
///
/// Written `auto`, `host`, `cuda` or `cuda:N`. Ordinals are CUDA's, so `CUDA_VISIBLE_DEVICES` decides what they mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuSelect {
    /// The first CUDA GPU if the driver and a device are there, else the host GPU. [`crate::GpuInfo::notes`] says why.
    #[default]
    Auto,
    /// Operating system threads of this process.
    Host,
    /// A CUDA GPU: the ordinal, or the first.
    Cuda(Option<u32>),
}

impl FromStr for GpuSelect {
    type Err = GpuError;

    fn from_str(text: &str) -> Result<Self, GpuError> {
        let bad = || GpuError::BadSelection(text.to_owned());
        match text {
            "auto" => Ok(Self::Auto),
            "host" => Ok(Self::Host),
            "cuda" => Ok(Self::Cuda(None)),
            _ => {
                let digits = text.strip_prefix("cuda:").ok_or_else(bad)?;
                // `parse` alone would take "+1".
                if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
                    return Err(bad());
                }
                digits
                    .parse()
                    .map(|n| Self::Cuda(Some(n)))
                    .map_err(|_| bad())
            }
        }
    }
}

impl fmt::Display for GpuSelect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Host => f.write_str("host"),
            Self::Cuda(None) => f.write_str("cuda"),
            Self::Cuda(Some(n)) => write!(f, "cuda:{n}"),
        }
    }
}

/// One set of kernels in both forms: PTX text for a CUDA GPU and functions for the host GPU.
///
/// Every kernel takes one argument: the address of its parameter structure in memory that the GPU reads.
#[derive(Clone, Copy)]
pub struct Module {
    /// PTX text; loaded whole when a CUDA GPU is opened, so that nothing is loaded while a kernel runs.
    pub ptx: &'static str,
    /// The same kernels as host functions.
    pub host: &'static [HostKernel],
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.host.iter().map(|k| k.name).collect();
        f.debug_struct("Module")
            .field("ptx_bytes", &self.ptx.len())
            .field("host", &names)
            .finish()
    }
}

/// The shape of a launch: a one-dimensional grid of one-dimensional blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Blocks in the grid.
    pub blocks: u32,
    /// Threads in each block.
    pub threads: u32,
}

impl Dims {
    /// `blocks` x `threads`.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads }
    }

    /// Threads of the whole grid.
    pub const fn total(self) -> u64 {
        self.blocks as u64 * self.threads as u64
    }
}

/// Called by a waiting host kernel thread instead of spinning; see [`LaunchOpts::relax`].
pub type RelaxHook = Arc<dyn Fn() + Send + Sync>;

/// What may be said about a launch beyond its shape. The default is right for most.
#[derive(Clone, Default)]
pub struct LaunchOpts {
    /// Host GPU: called whenever a kernel thread has to wait, by that thread. A caller-driven HCA runs here, so that
    /// two processes on two cores are two spinners and not four. Ignored by a CUDA GPU.
    pub relax: Option<RelaxHook>,
    /// Host GPU: run the 32-lane form of the kernel, in which threads are lanes of emulated warps (slow; for tests).
    /// Ignored by a CUDA GPU, which has warps.
    pub emulate_warp: bool,
}

impl fmt::Debug for LaunchOpts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaunchOpts")
            .field("relax", &self.relax.is_some())
            .field("emulate_warp", &self.emulate_warp)
            .finish()
    }
}

/// Where a buffer lives.
///
/// On the host GPU all three are host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemKind {
    /// The GPU's own memory. A small allocation may share a 2 MiB driver block with others, which an IPC export opens
    /// to the importer as a whole.
    Device,
    /// Host memory that the GPU reads and writes at [`crate::Buffer::device_addr`].
    PinnedHost,
    /// The GPU's own memory, allocated by itself so that it can be exported as a file descriptor and nothing beside it.
    Vmm,
}

impl fmt::Display for MemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::PinnedHost => "pinned host",
            Self::Vmm => "exportable device",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selection_round_trips() {
        for (text, want) in [
            ("auto", GpuSelect::Auto),
            ("host", GpuSelect::Host),
            ("cuda", GpuSelect::Cuda(None)),
            ("cuda:0", GpuSelect::Cuda(Some(0))),
            ("cuda:17", GpuSelect::Cuda(Some(17))),
        ] {
            assert_eq!(text.parse::<GpuSelect>().unwrap(), want);
            assert_eq!(want.to_string(), text);
        }
    }

    #[test]
    fn selection_refuses_what_it_does_not_know() {
        for text in [
            "",
            "Host",
            "cuda:",
            "cuda:+1",
            "cuda:-1",
            "cuda:1 ",
            "cuda:99999999999",
            "gpu",
        ] {
            let error = text.parse::<GpuSelect>().unwrap_err().to_string();
            assert!(
                error.contains(&format!("`{text}`")) && error.contains("cuda:N"),
                "{error}"
            );
        }
    }
}
