//! What the fuzzers run: any bytes as what a peer sends, with everything asserted that must hold whatever comes in.
//!
//! Shared by the fuzz crate at the repository's root and by `any_bytes.rs`, which runs the same on stable Rust.

use doorbell::{Endpoint, MAX_REGIONS};

/// Any bytes as an endpoint: refused in words, or accepted and written back to the same bytes.
pub(crate) fn endpoint(data: &[u8]) {
    match Endpoint::from_bytes(data) {
        Ok(endpoint) => {
            assert!(endpoint.qpn >> 24 == 0 && endpoint.regions.len() <= MAX_REGIONS);
            for region in &endpoint.regions {
                assert!(region.addr.checked_add(region.len).is_some());
            }
            let back = Endpoint::from_bytes(&endpoint.to_bytes()).expect("what was written parses");
            assert_eq!(back, endpoint);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
