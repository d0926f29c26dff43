//! What a kernel's error number says, in words.

use doorbell_device::Failure;
use doorbell_wire::{Syndrome, Vendor};

/// A device error's number in words, syndromes by name.
pub(crate) fn words(code: u64) -> String {
    match doorbell_device::Error::from_code(code) {
        Some(error) => match error.failure() {
            Failure::Completion {
                syndrome,
                vendor,
                wqe_index,
            } => {
                let mut text =
                    format!("WQE {wqe_index} completed in error: {}", Syndrome(syndrome));
                if Vendor(vendor) != Vendor::NONE {
                    text.push_str(&format!("; vendor syndrome {}", Vendor(vendor)));
                }
                text
            }
            Failure::TimedOut => "what it waited for did not happen by its deadline".to_owned(),
            _ => error.to_string(),
        },
        None => "no error".to_owned(),
    }
}
