//! The list of kernels: one line each makes the PTX entry and the host function.

use crate::{latency, messages, proxy, rate, selftest};

macro_rules! kernels {
    ($($(#[$doc:meta])* $name:ident($params:ty) = $body:path;)+) => {
        #[cfg(all(target_arch = "nvptx64", not(any(feature = "device-functions", feature = "copies"))))]
        mod ptx {
            #[allow(unused_imports)]
            use super::*;
            $(
                $(#[$doc])*
                #[unsafe(no_mangle)]
                pub unsafe extern "ptx-kernel" fn $name(params: *const $params) {
                    // SAFETY: the launcher's promise: parameters as documented.
                    unsafe { $body(doorbell_device::nvptx::Gpu, &*params) }
                }
            )+
        }

        /// The kernels for host threads.
        #[cfg(not(target_arch = "nvptx64"))]
        pub const HOST: &[doorbell_device::host::HostKernel] = &[COPIES, $({
            use doorbell_device::host::{HostKernel, HostThread};
            unsafe fn fast(t: &HostThread<1>, params: *const u8) {
                // SAFETY: the launcher's promise: parameters as documented, aligned.
                unsafe { $body(t, &*params.cast::<$params>()) }
            }
            unsafe fn warp(t: &HostThread<32>, params: *const u8) {
                // SAFETY: as above.
                unsafe { $body(t, &*params.cast::<$params>()) }
            }
            HostKernel { name: stringify!($name), fast, warp }
        }),+];
    };
}

/// The copier's kernel, with its parameters as arguments: they come with the launch, and memory of the host is a microsecond away.
#[cfg(all(target_arch = "nvptx64", feature = "copies"))]
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn copies(
    board: u64,
    number: u64,
    first: u64,
    last: u64,
    times: u64,
) {
    let post = [first, last];
    let call = crate::board::CopyCall {
        board,
        number,
        post,
        times,
    };
    // SAFETY: the launcher's promise: a board as documented.
    unsafe { crate::copies::copies(doorbell_device::nvptx::Gpu, call) }
}

/// The same for host threads.
#[cfg(not(target_arch = "nvptx64"))]
const COPIES: doorbell_device::host::HostKernel = {
    use crate::board::CopyCall;
    use doorbell_device::host::{HostKernel, HostThread};
    unsafe fn on<const LANES: usize>(t: &HostThread<LANES>, params: *const u8) {
        // SAFETY: the launcher's promise: parameters as documented, aligned.
        unsafe { crate::copies::copies(t, params.cast::<CopyCall>().read()) }
    }
    HostKernel {
        name: "copies",
        fast: on::<1>,
        warp: on::<32>,
    }
};

use crate::params::{Echo, Forward, Hammer, Latency, Ping, Proxy, Rate, Raw};

kernels! {
    /// Puts.
    put_bw(Rate) = rate::put;
    /// Gets.
    get_bw(Rate) = rate::get;
    /// Fetch and add.
    atomic_rate(Rate) = rate::atomic;
    /// Puts posted into a ring that nobody executes.
    post(Rate) = rate::post;
    /// Puts there and back.
    put_lat(Latency) = latency::put;
    /// Puts with a signal, there and back.
    signal_lat(Latency) = latency::signal;
    /// Gets, one at a time.
    get_lat(Latency) = latency::get;
    /// Answers messages through the QP.
    forward(Forward) = latency::forward;
    /// Answers messages with plain stores.
    bare_echo(Forward) = latency::bare_echo;
    /// Answers messages that take receives.
    echo(Echo) = messages::echo;
    /// Sends them, and takes the answers.
    ping(Ping) = messages::ping;
    /// Hands puts to a CPU thread.
    proxy_put(Proxy) = proxy::put;
    /// Random mixture on shared QPs.
    hammer(Hammer) = selftest::hammer;
    /// Slots as they are.
    raw_post(Raw) = selftest::raw_post;
}
