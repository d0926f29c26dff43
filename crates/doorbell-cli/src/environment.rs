//! What a figure was measured on: kernel, CPU, quota, memory, GPU, versions.
//! Everything is read from the kernel's own files; what cannot be read is absent, never guessed.

use std::path::{Path, PathBuf};

/// Facts about the machine that do not depend on the run.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    pub(crate) kernel: Option<String>,
    pub(crate) cpu: Option<String>,
    pub(crate) cpus: u64,
    pub(crate) cpu_quota: Option<f64>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) memory_limit: Option<u64>,
    /// Bytes that may be locked; `None` when unlimited.
    pub(crate) memlock: Option<u64>,
}

impl Machine {
    /// Reads them now.
    pub(crate) fn read() -> Self {
        let uname = rustix::system::uname();
        let join = |a: &std::ffi::CStr, b: &std::ffi::CStr| {
            format!("{} {}", a.to_string_lossy(), b.to_string_lossy())
        };
        Self {
            kernel: Some(join(uname.sysname(), uname.release())),
            cpu: cpu_model(&read("/proc/cpuinfo").unwrap_or_default()),
            cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u64),
            cpu_quota: cgroup_files("cpu.max")
                .filter_map(|file| quota(&std::fs::read_to_string(file).ok()?))
                .reduce(f64::min),
            memory_bytes: mem_total(&read("/proc/meminfo").unwrap_or_default()),
            memory_limit: cgroup_files("memory.max")
                .filter_map(|file| std::fs::read_to_string(file).ok()?.trim().parse().ok())
                .reduce(u64::min),
            memlock: rustix::process::getrlimit(rustix::process::Resource::Memlock).current,
        }
    }
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// `name` in this process's cgroup (version 2) and in each of its parents: the tightest counts.
fn cgroup_files(name: &str) -> impl Iterator<Item = PathBuf> {
    let own = read("/proc/self/cgroup").unwrap_or_default();
    let path = own
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .unwrap_or("")
        .to_owned();
    let leaf = Path::new("/sys/fs/cgroup").join(path);
    let all: Vec<PathBuf> = leaf
        .ancestors()
        .take_while(|dir| dir.starts_with("/sys/fs/cgroup"))
        .map(|dir| dir.join(name))
        .collect();
    all.into_iter()
}

/// `max 100000` is no quota; `150000 100000` is 1.5 cores.
fn quota(text: &str) -> Option<f64> {
    let mut words = text.split_whitespace();
    let quota: f64 = words.next()?.parse().ok()?;
    let period: f64 = words.next()?.parse().ok()?;
    (period > 0.0).then(|| quota / period)
}

fn cpu_model(cpuinfo: &str) -> Option<String> {
    cpuinfo
        .lines()
        .find(|line| line.starts_with("model name"))
        .and_then(|line| line.split_once(':'))
        .map(|(_, name)| name.trim().to_owned())
}

fn mem_total(meminfo: &str) -> Option<u64> {
    meminfo_bytes(meminfo, "MemTotal:")
}

fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.starts_with(name))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

/// Bytes that programs can have now without swapping, and no more than this process's cgroups allow it.
pub(crate) fn memory_available() -> Option<u64> {
    let free = meminfo_bytes(&read("/proc/meminfo")?, "MemAvailable:");
    free.into_iter().chain(Machine::read().memory_limit).min()
}

/// Version of the NVIDIA kernel driver, as it says itself.
pub(crate) fn nvidia_driver() -> Option<String> {
    read("/sys/module/nvidia/version").map(|v| v.trim().to_owned())
}

/// Now, UTC, as RFC 3339 to the second.
pub(crate) fn utc_now() -> String {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    rfc3339(now)
}

/// Days to a date by the usual era arithmetic (the proleptic Gregorian calendar repeats every
/// 146,097 days; years are taken from March so that the leap day is the last of a year).
fn rfc3339(unix: u64) -> String {
    let (days, second) = (unix / 86_400, unix % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_796_000_399), "2026-11-30T00:59:59Z");
        assert_eq!(rfc3339(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn kernel_files() {
        assert_eq!(quota("max 100000\n"), None);
        assert_eq!(quota("150000 100000\n"), Some(1.5));
        assert_eq!(quota(""), None);
        assert_eq!(
            cpu_model("processor : 0\nmodel name\t: Some CPU @ 2\n").as_deref(),
            Some("Some CPU @ 2")
        );
        assert_eq!(mem_total("MemTotal:  2 kB\nMemFree: 1 kB\n"), Some(2048));
        let free = meminfo_bytes("MemTotal: 9 kB\nMemAvailable: 2 kB\n", "MemAvailable:");
        assert_eq!(free, Some(2048));
        let machine = Machine::read();
        assert!(memory_available() <= machine.memory_bytes);
        assert!(machine.cpus >= 1);
        assert!(machine.kernel.is_some());
    }
}
