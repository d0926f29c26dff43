//! The structures and constants of `doorbell.h`, in Rust.
//!
//! The header is written by hand, because people read it. What keeps the two equal is a test that compiles the header and
//! compares every size, offset and number with the lists that the macros here make (tests/header.rs).

use std::ffi::c_char;
use std::mem::{offset_of, size_of};

use crate::error::{Failure, Result};
use crate::status::Status;

/// A structure's layout, as tests/header.rs needs it.
#[derive(Debug)]
pub struct Layout {
    /// Its name in C.
    pub name: &'static str,
    /// Its size in bytes.
    pub size: usize,
    /// Field and offset.
    pub fields: &'static [(&'static str, usize)],
}

macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[allow(non_camel_case_types, reason = "the C name")]
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $($(#[$fdoc])* pub $field: $type,)* }
        )*
        /// Every structure of the header.
        pub const LAYOUTS: &[Layout] = &[$(Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            fields: &[$((stringify!($field), offset_of!($name, $field))),*],
        }),*];
    };
}

structures! {
    /// What `doorbell_device_open` is asked for.
    doorbell_device_attr {
        /// `sizeof` of the caller.
        size: usize,
        /// Which GPU; NULL for the default.
        gpu: *const c_char,
        /// Engine threads; 0 for the default.
        hca_cores: u32,
        /// `DOORBELL_DEVICE_*`.
        flags: u32,
        /// Nanoseconds that destroying waits; 0 for the default.
        quiesce_ns: u64,
        /// Faults to play; NULL for the default.
        fault: *const c_char,
    }
    /// What was opened.
    doorbell_device_info {
        /// `sizeof` of the caller.
        size: usize,
        /// Terminated name.
        name: [c_char; 128],
        /// Terminated PCI address.
        pci_bus_id: [c_char; 32],
        /// 1 for a CUDA GPU.
        is_cuda: i32,
        /// CUDA ordinal or -1.
        ordinal: i32,
        /// NUMA node or -1.
        numa_node: i32,
        /// Multiprocessors, or CPU cores.
        sm_count: u32,
        /// Compute capability.
        compute_major: u32,
        /// Compute capability.
        compute_minor: u32,
        /// CUDA version of the driver.
        driver_major: u32,
        /// CUDA version of the driver.
        driver_minor: u32,
        /// Engine threads; 0 when caller-driven.
        hca_cores: u32,
        /// Zero.
        reserved: u32,
    }
    /// A registered region.
    doorbell_mr_info {
        /// `sizeof` of the caller.
        size: usize,
        /// What work requests name for its first byte.
        address: u64,
        /// Bytes.
        length: u64,
        /// Local and remote key.
        key: u32,
        /// `DOORBELL_ACCESS_*`.
        access: u32,
    }
    /// What `doorbell_qp_create` is asked for.
    doorbell_qp_attr {
        /// `sizeof` of the caller.
        size: usize,
        /// Slots; 0 for the default.
        depth: u32,
        /// `DOORBELL_HANDLER_*`.
        handler: u32,
        /// `DOORBELL_CQ_*`.
        cq: u32,
        /// Slots of the companion queue; 0 for none.
        companion: u32,
        /// Receives of the receive queue; 0 for none.
        receives: u32,
        /// Pieces of memory of a receive; 0 for 1.
        receive_pieces: u32,
    }
    /// A message that took a receive.
    doorbell_message {
        /// `sizeof` of the caller.
        size: usize,
        /// `DOORBELL_ARRIVAL_*`.
        arrival: u32,
        /// Its bytes.
        length: u32,
        /// Its immediate.
        immediate: u32,
        /// Zero.
        reserved: u32,
    }
    /// What a kernel gets (the device crate's `QpHandle`).
    doorbell_qp_t {
        /// DOCA's layout.
        qp: usize,
        /// Ours, beside it.
        ext: usize,
    }
    /// A peer's region.
    doorbell_remote_mr {
        /// What work requests name for its first byte.
        address: u64,
        /// Bytes.
        length: u64,
        /// Its key.
        key: u32,
        /// Zero.
        reserved: u32,
    }
    /// State and counters of a queue pair.
    doorbell_qp_info {
        /// `sizeof` of the caller.
        size: usize,
        /// QP number.
        number: u32,
        /// `DOORBELL_QP_*`.
        state: u32,
        /// Slots.
        depth: u32,
        /// `DOORBELL_HANDLER_*`.
        handler: u32,
        /// Rings that the engine saw.
        doorbells: u64,
        /// Slots announced.
        slots_rung: u64,
        /// Work requests executed.
        wqes: u64,
        /// Payload bytes moved.
        bytes: u64,
        /// Slots flushed in the error state.
        flushed: u64,
    }
    /// The first error of a queue pair.
    doorbell_qp_error_info {
        /// `sizeof` of the caller.
        size: usize,
        /// 0 none, 1 completion, 2 closed, 3 engine down.
        kind: u32,
        /// mlx5's syndrome.
        syndrome: u32,
        /// Doorbell's syndrome.
        vendor: u32,
        /// Modulo 2^16.
        wqe_index: u32,
        /// In words.
        text: [c_char; 400],
    }
}

macro_rules! constants {
    ($($name:ident = $value:expr;)*) => {
        $(#[doc = concat!("`", stringify!($name), "` of `doorbell.h`.")] pub const $name: u32 = $value;)*
        /// Every number of the header, statuses left out (see [`crate::ALL`]).
        pub const CONSTANTS: &[(&str, u32)] = &[$((stringify!($name), $name)),*];
    };
}

constants! {
    DOORBELL_VERSION_MAJOR = 0;
    DOORBELL_VERSION_MINOR = 1;
    DOORBELL_DEVICE_CALLER_DRIVEN = 1;
    DOORBELL_MEM_GPU = 0;
    DOORBELL_MEM_HOST = 1;
    DOORBELL_MEM_SHARED = 2;
    DOORBELL_ACCESS_LOCAL_WRITE = 1;
    DOORBELL_ACCESS_REMOTE_WRITE = 2;
    DOORBELL_ACCESS_REMOTE_READ = 4;
    DOORBELL_ACCESS_REMOTE_ATOMIC = 8;
    DOORBELL_ACCESS_ALL = 15;
    DOORBELL_ADDRESS_BASED = 0;
    DOORBELL_ZERO_BASED = 1;
    DOORBELL_HANDLER_DEFAULT = 0;
    DOORBELL_HANDLER_PRODUCER = 1;
    DOORBELL_HANDLER_RECORD = 2;
    DOORBELL_HANDLER_DOORBELL = 10;
    DOORBELL_CQ_DEFAULT = 0;
    DOORBELL_CQ_PER_SLOT = 1;
    DOORBELL_CQ_COLLAPSED = 2;
    DOORBELL_QP_RESET = 0;
    DOORBELL_QP_READY = 1;
    DOORBELL_QP_ERROR = 2;
    DOORBELL_QP_DESTROYED = 3;
    DOORBELL_ARRIVAL_WRITE_IMM = 1;
    DOORBELL_ARRIVAL_SEND = 2;
    DOORBELL_ARRIVAL_SEND_IMM = 3;
    DOORBELL_ERROR_NONE = 0;
    DOORBELL_ERROR_COMPLETION = 1;
    DOORBELL_ERROR_CLOSED = 2;
    DOORBELL_ERROR_ENGINE_DOWN = 3;
}

/// A structure that begins with its size, so that programs and libraries of different versions can meet.
///
/// # Safety
/// The type is `repr(C)`, begins with `size: usize`, and every bit pattern of the rest is a value of it.
pub(crate) unsafe trait Versioned: Copy {
    /// Its name in C.
    const NAME: &'static str;
}

macro_rules! versioned {
    ($($name:ident)*) => {
        $(
            // SAFETY: declared above: repr(C), `size` first, then integers, raw pointers and arrays of integers.
            unsafe impl Versioned for $name { const NAME: &'static str = stringify!($name); }
        )*
    };
}

versioned! { doorbell_device_attr doorbell_device_info doorbell_mr_info doorbell_qp_attr doorbell_qp_info doorbell_qp_error_info doorbell_message }

/// The size a caller wrote into its structure, if it can be one.
///
/// # Safety
/// `at` is null or points at a readable `size_t`.
unsafe fn size_at<T: Versioned>(at: *const T) -> Result<usize> {
    if at.is_null() {
        return Err(Failure::invalid(T::NAME, "NULL", "pass a pointer to one"));
    }
    // SAFETY: the caller's promise; alignment is not relied upon.
    let size = unsafe { at.cast::<usize>().read_unaligned() };
    // No structure of this library is shorter than its size and one field, or longer than a page.
    if !(2 * size_of::<usize>()..=4096).contains(&size) {
        return Err(Failure::new(
            Status::Version,
            format_args!(
                "{}.size is {size}: start from its _INIT macro, or set it to sizeof({})",
                T::NAME,
                T::NAME
            ),
        ));
    }
    Ok(size)
}

/// Reads a caller's structure: what it has, and zero for what it does not know yet.
///
/// # Safety
/// `at` is null or points at a structure of which `size` bytes are readable.
pub(crate) unsafe fn read<T: Versioned>(at: *const T) -> Result<T> {
    // SAFETY: the caller's promise.
    let theirs = unsafe { size_at(at) }?;
    let mut ours = std::mem::MaybeUninit::<T>::zeroed();
    let known = theirs.min(size_of::<T>());
    // SAFETY: `known` bytes are readable there (the caller's promise) and writable here; zeroed or copied bytes are a `T` (`Versioned`).
    let ours = unsafe {
        std::ptr::copy_nonoverlapping(at.cast::<u8>(), ours.as_mut_ptr().cast::<u8>(), known);
        ours.assume_init()
    };
    // A field that this library does not have must be at its default, or the caller would be misunderstood.
    for i in size_of::<T>()..theirs {
        // SAFETY: inside the caller's structure.
        if unsafe { at.cast::<u8>().add(i).read() } != 0 {
            return Err(Failure::new(
                Status::Version,
                format_args!(
                    "{} of {theirs} bytes sets byte {i}, this library knows {}: use a newer library",
                    T::NAME,
                    size_of::<T>()
                ),
            ));
        }
    }
    Ok(ours)
}

/// Fills a caller's structure as far as it goes; its `size` stays the caller's.
///
/// # Safety
/// `at` is null or points at a structure of which `size` bytes are writable.
pub(crate) unsafe fn write<T: Versioned>(at: *mut T, value: T) -> Result<()> {
    // SAFETY: the caller's promise.
    let theirs = unsafe { size_at(at) }?;
    let skip = size_of::<usize>();
    let known = theirs.min(size_of::<T>());
    // SAFETY: inside the caller's structure, and inside `value`.
    unsafe {
        std::ptr::copy_nonoverlapping(
            (&raw const value).cast::<u8>().add(skip),
            at.cast::<u8>().add(skip),
            known - skip,
        );
        std::ptr::write_bytes(at.cast::<u8>().add(known), 0, theirs - known);
    }
    Ok(())
}

/// `text` in a terminated array, cut at a character's edge if it is longer.
pub(crate) fn text<const N: usize>(text: &str) -> [c_char; N] {
    let mut end = text.len().min(N - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let mut out = [0; N];
    for (to, from) in out.iter_mut().zip(text[..end].bytes()) {
        *to = from as c_char;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_and_newer_callers_are_understood() {
        let mut attr = doorbell_qp_attr {
            size: 16,
            depth: 64,
            handler: 2,
            cq: 9,
            companion: 9,
            receives: 9,
            receive_pieces: 9,
        };
        // SAFETY: `attr` is a whole structure; `size` says less.
        let old = unsafe { read(&raw const attr) }.expect("an older caller");
        assert_eq!(
            (old.depth, old.handler, old.cq, old.companion),
            (64, 2, 0, 0)
        );

        #[repr(C)]
        struct Newer {
            attr: doorbell_qp_attr,
            more: u64,
        }
        attr.size = size_of::<Newer>();
        let mut newer = Newer { attr, more: 0 };
        // SAFETY: `Newer` is as large as its size says and begins with the structure.
        let ours = unsafe { read((&raw const newer).cast::<doorbell_qp_attr>()) }
            .expect("a newer caller with defaults");
        assert_eq!(ours.companion, 9);
        newer.more = 1;
        // SAFETY: as above.
        let refused = unsafe { read((&raw const newer).cast::<doorbell_qp_attr>()) };
        assert_eq!(
            refused.err().expect("a field from the future").status,
            Status::Version
        );
    }

    #[test]
    fn nonsense_sizes_are_refused() {
        for size in [0, 8, 5000, usize::MAX] {
            let attr = doorbell_qp_attr {
                size,
                depth: 0,
                handler: 0,
                cq: 0,
                companion: 0,
                receives: 0,
                receive_pieces: 0,
            };
            assert_eq!(
                // SAFETY: refused before anything past `size` is read.
                unsafe { read(&raw const attr) }
                    .err()
                    .expect("refused")
                    .status,
                Status::Version
            );
        }
        assert_eq!(
            // SAFETY: null is allowed.
            unsafe { read::<doorbell_qp_attr>(std::ptr::null()) }
                .err()
                .expect("refused")
                .status,
            Status::Invalid
        );
    }

    #[test]
    fn answers_stay_inside_the_callers_structure() {
        let mut buffer = [0xa5u8; 64];
        buffer[..8].copy_from_slice(&24usize.to_ne_bytes());
        let value = doorbell_mr_info {
            size: 1,
            address: 2,
            length: 3,
            key: 4,
            access: 5,
        };
        // SAFETY: 64 bytes are writable, the size says 24.
        unsafe { write(buffer.as_mut_ptr().cast::<doorbell_mr_info>(), value) }.expect("fits");
        assert_eq!(
            buffer[..8],
            24usize.to_ne_bytes(),
            "the caller's size stays"
        );
        assert_eq!(
            buffer[8..24],
            [2u64.to_ne_bytes(), 3u64.to_ne_bytes()].concat()[..]
        );
        assert!(
            buffer[24..].iter().all(|b| *b == 0xa5),
            "not a byte further"
        );
    }

    #[test]
    fn texts_are_terminated_and_cut_between_characters() {
        assert_eq!(text::<4>("ab"), [97, 98, 0, 0]);
        assert_eq!(text::<4>("abcdef"), [97, 98, 99, 0]);
        assert_eq!(text::<4>("abé"), [97, 98, 0, 0]);
    }
}
