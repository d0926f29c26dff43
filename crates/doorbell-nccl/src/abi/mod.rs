//! NCCL's plug-in interface, declared anew: tables of functions, configurations, properties, and what device code reads.
//!
//! Each structure is declared once, with the name that NCCL's headers give it and the size and offsets that were found there;
//! the compiler asserts them. [`layouts`] lists them, so that a test can ask NCCL's own headers about every number
//! (`tests/headers.rs`). Facts come from NCCL 2.28.9 (`v11`) and 2.30.7 (`v12` to `v14`), whose numbers 2.32.3 still has.

use std::ffi::{c_char, c_int, c_ulong};

pub mod device;
pub mod gin;
pub mod net;
pub mod rma;

/// `ncclResult_t`.
pub type Status = c_int;

/// `ncclDebugLogger_t`: level, subsystems, file, line, `printf` format.
pub type Logger =
    Option<unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...) -> ()>;

/// Bytes of a handle that NCCL carries between ranks (`NCCL_NET_HANDLE_MAXSIZE`).
pub const HANDLE: usize = 128;

/// Memory of the host (`NCCL_PTR_HOST`).
pub const PTR_HOST: c_int = 1;
/// Memory of the GPU (`NCCL_PTR_CUDA`).
pub const PTR_CUDA: c_int = 2;
/// Memory by its DMA-BUF descriptor (`NCCL_PTR_DMABUF`).
pub const PTR_DMABUF: c_int = 4;

/// A structure that NCCL declares too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Its name in NCCL's headers.
    pub c_name: &'static str,
    /// The releases whose headers have it, as `major * 10000 + minor * 100 + patch`: from, to.
    pub releases: (u32, u32),
    /// Bytes.
    pub size: usize,
    /// Name in NCCL's headers, and offset.
    pub fields: Vec<(&'static str, usize)>,
}

/// Declares a `repr(C)` structure together with its name, releases, size and offsets at NCCL.
macro_rules! layout {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident = $c_name:literal, $from:literal ..= $to:literal, $size:literal bytes {
            $( $(#[$doc:meta])* $field:ident : $ty:ty = $c_field:literal @ $offset:literal, )*
        }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        $vis struct $name {
            $( $(#[$doc])* pub $field: $ty, )*
        }

        const _: () = {
            assert!(::core::mem::size_of::<$name>() == $size);
            $( assert!(::core::mem::offset_of!($name, $field) == $offset); )*
        };

        impl $name {
            /// What NCCL's headers must say about it.
            pub fn layout() -> $crate::abi::Layout {
                $crate::abi::Layout {
                    c_name: $c_name,
                    releases: ($from, $to),
                    size: $size,
                    // Padding that is named here has no name there.
                    fields: [$( ($c_field, $offset) ),*]
                        .into_iter()
                        .filter(|(name, _)| !name.is_empty())
                        .collect(),
                }
            }
        }
    };
}
pub(crate) use layout;

/// Every structure that crosses the boundary to NCCL or to device code that was compiled with its headers.
pub fn layouts() -> Vec<Layout> {
    vec![
        gin::GinV14::layout(),
        gin::GinConfigV14::layout(),
        gin::GinPropertiesV14::layout(),
        gin::GinV11::layout(),
        rma::RmaV14::layout(),
        rma::RmaConfigV14::layout(),
        net::NetPropertiesV12::layout(),
        net::NetPropertiesV11::layout(),
        net::DeviceHandle::layout(),
        net::NetV11::layout(),
        device::Context2::layout(),
        device::Context0::layout(),
        device::MemHandle::layout(),
        device::OldQp::layout(),
        device::gpu_qp_layout(),
    ]
}

/// A table or a text that lies in the shared object for ever and that nobody changes.
#[derive(Debug)]
#[repr(transparent)]
pub struct Shared<T>(pub T);

// SAFETY: the tables hold function pointers and pointers to constant text; nothing is ever written.
unsafe impl<T> Sync for Shared<T> {}
