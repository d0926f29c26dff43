//! Who copies: the copy engine alone, or a kernel too. Decided once, when a GPU is opened; only launches that
//! turn out to wait, under a profiler in the process, change it afterwards ([`super::lane`]).

use crate::{GpuError, Result};

/// The variable that says it.
const VARIABLE: &str = "DOORBELL_GPU_COPIES";

/// What the variable says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// The copy engine, whatever the copies are.
    Engine,
    /// A kernel, wherever it may.
    Kernel,
    /// Whatever is quicker.
    Auto,
}

impl Policy {
    /// From the environment, with a sentence about why it is not what was asked for, or what one would expect.
    pub(crate) fn of_environment() -> Result<(Self, Option<String>)> {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(var: impl Fn(&str) -> Option<String>) -> Result<(Self, Option<String>)> {
        let asked = match var(VARIABLE).as_deref().map(str::trim) {
            None | Some("" | "auto") => Self::Auto,
            Some("engine") => {
                let note = format!("{VARIABLE}=engine: small copies by the copy engine too");
                return Ok((Self::Engine, Some(note)));
            }
            Some("kernel") => Self::Kernel,
            Some(value) => {
                return Err(GpuError::BadSetting {
                    name: VARIABLE,
                    value: value.to_owned(),
                    known: "auto, engine, kernel",
                });
            }
        };
        // A launch that waits for its kernel waits for the kernels before it, and those may wait for our copies.
        let blocking = var("CUDA_LAUNCH_BLOCKING").is_some_and(|v| !matches!(v.trim(), "" | "0"));
        if blocking {
            let note =
                "small copies by the copy engine, since CUDA_LAUNCH_BLOCKING makes launches wait";
            return Ok((Self::Engine, Some(note.to_owned())));
        }
        // Profilers and sanitizers let kernels run one at a time.
        const INJECTED: &str = "CUDA_INJECTION64_PATH";
        if asked == Self::Auto && var(INJECTED).is_some_and(|v| !v.trim().is_empty()) {
            let note = format!(
                "small copies by the copy engine, since {INJECTED} is set and a tool may hold launches back; {VARIABLE}=kernel overrules"
            );
            return Ok((Self::Engine, Some(note)));
        }
        Ok((asked, None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(set: &[(&str, &str)]) -> Result<(Policy, Option<String>)> {
        let find = |name: &str| set.iter().find(|(n, _)| *n == name);
        Policy::of(|name| find(name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn the_variable_decides_unless_launches_block() {
        assert_eq!(of(&[]).unwrap(), (Policy::Auto, None));
        assert_eq!(of(&[(VARIABLE, "auto")]).unwrap(), (Policy::Auto, None));
        assert_eq!(of(&[(VARIABLE, "kernel")]).unwrap(), (Policy::Kernel, None));
        assert_eq!(of(&[(VARIABLE, " engine ")]).unwrap().0, Policy::Engine);
        let injected = ("CUDA_INJECTION64_PATH", "/opt/tool.so");
        assert_eq!(of(&[injected]).unwrap().0, Policy::Engine);
        assert_eq!(
            of(&[injected, (VARIABLE, "kernel")]).unwrap().0,
            Policy::Kernel
        );
        for value in ["1", "true"] {
            let (policy, note) =
                of(&[(VARIABLE, "kernel"), ("CUDA_LAUNCH_BLOCKING", value)]).unwrap();
            assert_eq!(policy, Policy::Engine);
            assert!(note.unwrap().contains("CUDA_LAUNCH_BLOCKING"));
        }
        assert_eq!(
            of(&[("CUDA_LAUNCH_BLOCKING", "0")]).unwrap().0,
            Policy::Auto
        );
        let error = of(&[(VARIABLE, "gpu")]).unwrap_err().to_string();
        assert!(
            error.contains("DOORBELL_GPU_COPIES") && error.contains("gpu"),
            "{error}"
        );
    }
}
