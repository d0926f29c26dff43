//! What the PTX must not contain, and what it consists of.

use std::fmt::Write as _;

use anyhow::{Result, bail, ensure};

/// The orders and scopes that a read-modify-write may have: PTX's default (relaxed, GPU) is never meant.
const ORDERS: [&str; 4] = [".relaxed", ".acquire", ".release", ".acq_rel"];
const SCOPES: [&str; 3] = [".cta", ".gpu", ".sys"];

/// Refuses PTX that rustc or we got wrong.
pub(super) fn check(ptx: &str, header: &str) -> Result<()> {
    for (n, line) in ptx.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default().trim();
        let at = || format!("line {}: {code}", n + 1);
        let op = code
            .strip_prefix('@')
            .and_then(|c| c.split_once(' '))
            .map_or(code, |(_, op)| op.trim());
        if op.starts_with("atom.") || op.starts_with("red.") {
            let named = |all: &[&str]| {
                all.iter()
                    .any(|s| op.split_whitespace().next().is_some_and(|o| o.contains(s)))
            };
            ensure!(
                named(&ORDERS) && named(&SCOPES),
                "an atomic without order and scope at {}",
                at()
            );
        }
        ensure!(
            !code.starts_with(".extern"),
            "something is left to link at {}",
            at()
        );
        ensure!(
            !op.starts_with("trap"),
            "a trap (code that LLVM thinks unreachable) at {}",
            at()
        );
        ensure!(!code.contains("panic"), "a panic at {}", at());
    }
    let mut functions: Vec<&str> = functions(ptx)
        .filter(|f| f.exported)
        .map(|f| f.name)
        .collect();
    functions.sort_unstable();
    let mut declared: Vec<&str> = header
        .lines()
        .filter_map(|l| l.trim().strip_prefix("DOORBELL_DEVICE_API "))
        .filter_map(|l| l.split('(').next()?.split_whitespace().last())
        .collect();
    declared.sort_unstable();
    if functions != declared {
        let missing: Vec<_> = functions.iter().filter(|f| !declared.contains(f)).collect();
        let extra: Vec<_> = declared.iter().filter(|f| !functions.contains(f)).collect();
        bail!("the header and the PTX differ: not declared {missing:?}, not there {extra:?}");
    }
    Ok(())
}

struct Function<'a> {
    name: &'a str,
    /// `.visible .func`: for CUDA C++ code to link.
    exported: bool,
    body: Vec<&'a str>,
}

fn functions(ptx: &str) -> impl Iterator<Item = Function<'_>> {
    let mut lines = ptx.lines();
    std::iter::from_fn(move || {
        loop {
            let head = lines.next()?;
            if !head.starts_with(".visible") && !head.starts_with(".func") {
                continue;
            }
            let exported = head.starts_with(".visible .func");
            let name = head
                .trim_end_matches('(')
                .trim_end()
                .rsplit([' ', '\t'])
                .next()
                .unwrap_or(head);
            let mut body = Vec::new();
            for line in lines.by_ref() {
                if line == ";" {
                    break;
                }
                if line == "}" {
                    return Some(Function {
                        name,
                        exported,
                        body,
                    });
                }
                body.push(line.trim());
            }
        }
    })
}

/// A table of the functions: instructions, and those that cost most.
pub(super) fn stats(ptx: &str) -> String {
    let mut out = format!(
        "{:<32} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7}\n",
        "function", "instr", "fence", "atom", "ld.acq", "calls", "local"
    );
    for f in functions(ptx) {
        let is_code = |l: &&&str| l.ends_with(';') && !l.starts_with('.') && !l.starts_with('$');
        let count = |what: &str| f.body.iter().filter(|l| l.contains(what)).count();
        let _ = writeln!(
            out,
            "{:<32} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7}",
            f.name,
            f.body.iter().filter(is_code).count(),
            count("fence."),
            count("atom."),
            count("ld.acquire"),
            count("call"),
            count(".local."),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(ptx: &str) -> String {
        check(ptx, "").expect_err("must be refused").to_string()
    }

    #[test]
    fn bare_atomics_are_refused() {
        assert!(refused("\tatom.global.add.u64 %rd1, [%rd2], 1;").contains("without order"));
        assert!(refused("\t@%p1 red.relaxed.global.add.u64 [%rd2], 1;").contains("without order"));
        check("\tatom.acq_rel.gpu.global.exch.b64 %rd1, [%rd2], %rd3;", "").expect("complete");
    }

    #[test]
    fn unresolved_and_unreachable_code_is_refused() {
        assert!(refused(".extern .func memcpy").contains("left to link"));
        assert!(refused("\ttrap; exit;").contains("trap"));
        assert!(refused("\tcall.uni core_panicking, ();").contains("panic"));
    }

    #[test]
    fn header_and_functions_must_agree() {
        let ptx = ".visible .func  (.param .b64 func_retval0) db_put(\n)\n{\n\tret;\n}\n";
        check(ptx, "DOORBELL_DEVICE_API uint64_t db_put(int a);").expect("declared");
        assert!(refused(ptx).contains("db_put"));
        let e = check("", "DOORBELL_DEVICE_API uint64_t db_get(void);").expect_err("not there");
        assert!(e.to_string().contains("db_get"));
    }
}
