//! The report for people: 80 columns, the verdict first, colours only when asked.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::report::{Gate, GateState, Library, Path, PathState, Report, Verdict, Who};

/// How the fix of a gate begins that nothing on this node can open.
const NO_FIX: &str = "none";

struct Screen {
    out: String,
    colour: bool,
    /// Columns.
    width: usize,
    /// Long fixes that were told: one is not told twice.
    told: BTreeSet<String>,
}

/// A fix of this length is worth a reference to the first time it was told.
const LONG: usize = 40;

/// The whole screen, `width` columns wide; `colour` for a terminal whose user did not set `NO_COLOR`.
pub fn screen(report: &Report, width: usize, colour: bool) -> String {
    let mut s = Screen {
        out: String::new(),
        colour,
        width: width.max(40),
        told: BTreeSet::new(),
    };
    s.verdict(report);
    s.node(report);
    for library in &report.libraries {
        s.library(library);
    }
    s.doorbell(report);
    s.unseen(report);
    s.out
}

const BOLD: &str = "1";
const DIM: &str = "2";
const RED: &str = "31";
const GREEN: &str = "32";
const YELLOW: &str = "33";

impl Screen {
    fn paint(&self, code: &str, text: &str) -> String {
        if self.colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn line(&mut self, text: &str) {
        self.out.push_str(text.trim_end());
        self.out.push('\n');
    }

    /// `text` after `head`, wrapped, following lines under its first column.
    fn wrapped(&mut self, head: &str, wide: usize, code: Option<&str>, text: &str) {
        for (i, line) in wrap(text, self.width - wide).into_iter().enumerate() {
            let line = match code {
                Some(code) => self.paint(code, &line),
                None => line,
            };
            if i == 0 {
                self.line(&format!("{head}{line}"));
            } else {
                self.line(&format!("{}{line}", " ".repeat(wide)));
            }
        }
    }

    fn section(&mut self, name: &str) {
        let head = self.paint(BOLD, name);
        self.line("");
        self.line(&head);
    }

    fn fact(&mut self, name: &str, value: &str) {
        let head = format!("  {name:<12}");
        self.wrapped(&head, 14, None, value);
    }

    fn verdict(&mut self, report: &Report) {
        let (code, text) = match report.verdict {
            Verdict::Native => (
                GREEN,
                "Every installed library drives the NIC from the GPU here.",
            ),
            Verdict::FallsBack => (
                YELLOW,
                "Not every installed library drives the NIC from the GPU here.",
            ),
            Verdict::NothingInstalled => (
                DIM,
                "None of NCCL, NVSHMEM, UCX, NIXL and DOCA is installed.",
            ),
        };
        let text = self.paint(code, text);
        self.line(&text);
        if report.libraries.is_empty() {
            return;
        }
        self.line("");
        for library in &report.libraries {
            let name = format!(
                "{} {}",
                title(library.name),
                library.version.as_deref().unwrap_or("?")
            );
            let (code, who) = who(library.who);
            let who = self.paint(code, &format!("{who:<9}"));
            let takes = library.takes.unwrap_or("no path at all");
            self.line(&format!(
                "  {name:<15} {:<6}  {who} {takes}",
                library.source
            ));
        }
    }

    fn node(&mut self, report: &Report) {
        self.section("Node");
        let m = &report.machine;
        if let Some(kernel) = &m.kernel {
            self.fact(
                "Linux",
                &format!(
                    "{kernel}{}",
                    m.arch.as_ref().map_or(String::new(), |a| format!(" {a}"))
                ),
            );
        }
        let mut groups: Vec<(String, usize)> = Vec::new();
        for gpu in &report.gpus {
            let text = format!("{} {}", gpu.vendor, gpu.name.trim_start_matches("NVIDIA "));
            match groups.iter_mut().find(|g| g.0 == text) {
                Some(group) => group.1 += 1,
                None => groups.push((text, 1)),
            }
        }
        let gpus: Vec<String> = groups
            .into_iter()
            .map(|(t, n)| format!("{n} x {t}"))
            .collect();
        self.fact(
            "GPUs",
            &if gpus.is_empty() {
                "none".to_owned()
            } else {
                gpus.join(", ")
            },
        );
        if let Some(d) = &report.driver {
            let flavour = match d.open {
                Some(true) => "open kernel modules",
                Some(false) => "proprietary kernel modules",
                None => "flavour unknown",
            };
            let cuda = d
                .cuda
                .as_ref()
                .map_or(String::new(), |c| format!(", CUDA up to {c}"));
            let mapping = match d.peer_mapping_override {
                Some(true) => "PeerMappingOverride=1",
                Some(false) => "PeerMappingOverride not set",
                None => "options unreadable",
            };
            self.fact(
                "driver",
                &format!("{} ({flavour}{cuda}), {mapping}", d.version),
            );
        }
        self.nics(report);
        self.distances(report);
        let memory = &report.memory;
        let ways: Vec<&str> = [
            (memory.nvidia_peermem, "nvidia_peermem"),
            (memory.nv_peer_mem, "nv_peer_mem"),
            (memory.efa_peermem, "efa_nv_peermem"),
            (memory.gdrdrv, "GDRCopy (gdrdrv)"),
        ]
        .iter()
        .filter(|w| w.0)
        .map(|w| w.1)
        .collect();
        if report.driver.is_some() {
            let buf = match memory.dma_buf {
                Some(true) => "yes",
                Some(false) => "no",
                None => "unknown",
            };
            self.fact("dma-buf", &format!("{buf}: {}", memory.dma_buf_why));
            self.fact(
                "modules",
                &if ways.is_empty() {
                    "no peer memory, no GDRCopy".to_owned()
                } else {
                    ways.join(", ")
                },
            );
        }
        self.limits(report);
    }

    fn nics(&mut self, report: &Report) {
        if report.nics.is_empty() {
            self.fact("NICs", "none with hardware behind them");
        }
        for (i, nic) in report.nics.iter().enumerate() {
            let state = nic.state.as_deref().unwrap_or("?").to_lowercase();
            let rate = nic.rate.as_deref().map_or(String::new(), |r| {
                format!(", {}", r.split(" (").next().unwrap_or(r))
            });
            let layer = nic
                .link_layer
                .as_deref()
                .map_or(String::new(), |l| format!(", {l}"));
            let what = if nic.rdma { "" } else { ", no RDMA" };
            let text = format!(
                "{}: {} {} ({}){layer}, {state}{rate}{what}",
                nic.name,
                nic.vendor,
                nic.model,
                nic.driver.as_deref().unwrap_or("no driver")
            );
            self.fact(if i == 0 { "NICs" } else { "" }, &text);
        }
    }

    /// Nearest first, one line a GPU; GPUs that see the same are one line.
    fn distances(&mut self, report: &Report) {
        let order = ["PIX", "PXB", "PHB", "NODE", "SYS"];
        let mut rows: Vec<(Vec<usize>, String)> = Vec::new();
        for (i, gpu) in report.gpus.iter().enumerate() {
            let mut text = String::new();
            for path in order {
                let nics: Vec<&str> = report
                    .distances
                    .iter()
                    .filter(|d| d.gpu == gpu.pci && d.path == path)
                    .map(|d| d.nic.as_str())
                    .collect();
                if !nics.is_empty() {
                    let _ = write!(
                        text,
                        "{}{path} {}",
                        if text.is_empty() { "" } else { "; " },
                        nics.join(", ")
                    );
                }
            }
            if text.is_empty() {
                continue;
            }
            match rows.iter_mut().find(|r| r.1 == text) {
                Some(row) => row.0.push(i),
                None => rows.push((vec![i], text)),
            }
        }
        for (i, (gpus, text)) in rows.iter().enumerate() {
            let gpus: Vec<String> = gpus.iter().map(usize::to_string).collect();
            self.fact(
                if i == 0 { "distance" } else { "" },
                &format!("GPU {}: {text}", gpus.join(",")),
            );
        }
        let redirected: Vec<String> = report
            .distances
            .iter()
            .filter(|d| d.acs_redirect == Some(true))
            .map(|d| format!("{} and {}", d.gpu, d.nic))
            .collect();
        if !redirected.is_empty() {
            self.fact(
                "ACS",
                &format!(
                    "switches send peer traffic of {} through the host: switch it off in firmware",
                    redirected.join("; ")
                ),
            );
        }
    }

    fn limits(&mut self, report: &Report) {
        let l = &report.limits;
        let mib = |bytes: u64| {
            if bytes >= 1 << 30 {
                format!("{} GiB", bytes >> 30)
            } else {
                format!("{} MiB", bytes >> 20)
            }
        };
        let memlock = match l.memlock {
            None => "memlock unlimited".to_owned(),
            Some(n) => format!("memlock {} (RDMA wants it unlimited: ulimit -l)", mib(n)),
        };
        let shm = l
            .shm
            .map_or(String::new(), |s| format!(", /dev/shm {}", mib(s)));
        let huge = l
            .hugepages
            .map_or(String::new(), |h| format!(", {h} huge pages"));
        let cgroup = match (l.memory, l.cpus) {
            (None, None) => String::new(),
            (m, c) => format!(
                ", cgroup:{}{}",
                m.map_or(String::new(), |m| format!(" {}", mib(m))),
                c.map_or(String::new(), |c| format!(" {c:.1} cores"))
            ),
        };
        self.fact("limits", &format!("{memlock}{shm}{huge}{cgroup}"));
        if let Some(kind) = &report.container.kind {
            self.fact(
                "container",
                &format!("{kind}: {}", report.container.why.as_deref().unwrap_or("")),
            );
        }
        if report.machine.iommu == Some(true) {
            self.fact(
                "IOMMU",
                "translates (iommu=pt on the kernel's command line is what peer traffic wants)",
            );
        }
    }

    fn library(&mut self, library: &Library) {
        let version = library.version.as_deref().unwrap_or("of unknown version");
        self.section(&format!("{} {version}", title(library.name)));
        let place = self.paint(DIM, &short(&library.path, self.width - 2));
        self.line(&format!("  {place}"));
        let mut told = BTreeSet::new();
        let mut all = library.paths.iter();
        let taken = all.position(|p| p.state == PathState::Taken);
        for (at, path) in library.paths.iter().enumerate() {
            let (code, mark, state) = match path.state {
                PathState::Taken => (GREEN, "▶", "takes this"),
                PathState::Open => (DIM, "·", "could"),
                PathState::Setting => (YELLOW, "○", "a setting away"),
                PathState::Blocked => (RED, "✗", "blocked"),
            };
            let mark = self.paint(code, mark);
            let state = self.paint(code, state);
            self.line(&format!(
                "  {mark} {:<42} {:<9} {state}",
                path.name,
                who(path.who).1
            ));
            // They are in the library's own order. One that comes before the path that is taken needs an explanation, and one behind it that the
            // GPU has more of.
            if taken.is_none_or(|taken| at <= taken) || path.who > library.who {
                self.gates(path, &mut told);
            }
        }
        for note in &library.notes {
            self.wrapped("    ", 4, Some(DIM), note);
        }
        let set: Vec<String> = library
            .variables
            .iter()
            .filter_map(|v| Some(format!("{}={}", v.name, v.value.as_ref()?)))
            .collect();
        if !set.is_empty() {
            self.wrapped("    set: ", 9, None, &set.join("  "));
        }
    }

    /// What stands against a path, unless a path above said the same. Without the hardware for it
    /// nothing else matters.
    fn gates(&mut self, path: &Path, told: &mut BTreeSet<String>) {
        let hopeless = |g: &&Gate| g.state == GateState::Fail && g.fix.starts_with(NO_FIX);
        let all: Vec<&Gate> = path
            .gates
            .iter()
            .filter(|g| g.state != GateState::Pass)
            .collect();
        let gates: Vec<&Gate> = match all.iter().find(|g| hopeless(g)) {
            Some(gate) => vec![gate],
            None => all,
        };
        if !gates.is_empty() && gates.iter().all(|g| told.contains(&g.found)) {
            let same = self.paint(DIM, "the same stands against it");
            self.line(&format!("      {same}"));
            return;
        }
        for gate in gates {
            told.insert(gate.found.clone());
            if gate.setting {
                let set = self.paint(YELLOW, "set   ");
                let now = if gate.found.ends_with("is not set") {
                    String::new()
                } else {
                    format!(" (now {})", gate.found)
                };
                self.wrapped(
                    &format!("      {set} "),
                    13,
                    None,
                    &format!("{}{now}", gate.fix),
                );
                continue;
            }
            let (code, word) = match gate.state {
                GateState::Unknown => (YELLOW, "unsure"),
                _ => (RED, "needs "),
            };
            let word = self.paint(code, word);
            self.wrapped(&format!("      {word} "), 13, None, &gate.what);
            self.wrapped("      found  ", 13, None, &gate.found);
            if gate.fix.len() > LONG && !self.told.insert(gate.fix.clone()) {
                self.line("      fix    as above");
            } else if !gate.fix.is_empty() {
                self.wrapped("      fix    ", 13, None, &gate.fix);
            }
        }
    }

    fn doorbell(&mut self, report: &Report) {
        self.section("Doorbell here");
        for here in &report.doorbell {
            let (code, mark) = if here.can {
                (GREEN, "yes")
            } else {
                (YELLOW, "no ")
            };
            let mark = self.paint(code, mark);
            self.wrapped(&format!("  {mark} {:<14} ", here.what), 21, None, &here.why);
        }
    }

    fn unseen(&mut self, report: &Report) {
        if report.unseen.is_empty() {
            return;
        }
        self.section("Not seen");
        for unseen in &report.unseen {
            self.wrapped("  ", 2, None, &format!("{}: {}", unseen.what, unseen.how));
        }
    }
}

fn title(name: &str) -> &'static str {
    match name {
        "nccl" => "NCCL",
        "nvshmem" => "NVSHMEM",
        "ucx" => "UCX",
        "nixl" => "NIXL",
        _ => "DOCA",
    }
}

fn who(who: Who) -> (&'static str, &'static str) {
    match who {
        Who::Native => (GREEN, "native"),
        Who::Assisted => (YELLOW, "assisted"),
        Who::Host => (YELLOW, "host"),
        Who::Nobody => (RED, "none"),
    }
}

/// A path that fits a line: its end says more than its beginning.
fn short(path: &str, room: usize) -> String {
    let length = path.chars().count();
    if length <= room {
        return path.to_owned();
    }
    let end: String = path.chars().skip(length + 1 - room).collect();
    format!("…{end}")
}

/// Breaks at spaces; a word that is too long stands alone.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}
