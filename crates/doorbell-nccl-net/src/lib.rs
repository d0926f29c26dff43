//! `libnccl-net-doorbell.so`: what NCCL 2.28.7 to 2.29.7 load (`NCCL_NET_PLUGIN`).
//!
//! Those releases look for a GIN plug-in inside a network plug-in only; that network then takes the place of the user's for everything, which is why
//! these two names are not in `libnccl-gin-doorbell.so`. All code is in [`doorbell_nccl::v11`].

use doorbell_nccl::abi::Shared;
use doorbell_nccl::abi::gin::GinV11;
use doorbell_nccl::abi::net::NetV11;
use doorbell_nccl::v11;

/// The GIN table that NCCL looks up by name.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclGinPlugin_v11: Shared<GinV11> = Shared(v11::GIN);

/// The network table that NCCL looks up by name, before the other.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclNetPlugin_v11: Shared<NetV11> = Shared(v11::NET);
