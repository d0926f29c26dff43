//! What settings win, what is refused, and that what is printed parses back.

use super::*;

fn with(config: &Config, vars: &[(&str, &str)]) -> Result<Settings, Error> {
    let vars: Vec<(String, String)> = vars
        .iter()
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .collect();
    config.resolve_with(2, &move |name| {
        vars.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone())
    })
}

fn line<'a>(s: &'a Settings, name: &str) -> &'a Setting {
    s.explain().iter().find(|l| l.name == name).unwrap()
}

#[test]
fn argument_beats_variable_beats_default() {
    let s = with(&Config::default(), &[]).unwrap();
    assert_eq!(
        (s.hca_cores, line(&s, "hca-cores").source),
        (HcaCores::Threads(1), Source::Default)
    );
    let vars = [
        ("DOORBELL_HCA_CORES", "0"),
        ("DOORBELL_GPU", "cuda:3"),
        ("DOORBELL_DEPTH", ""),
    ];
    let s = with(&Config::default(), &vars).unwrap();
    assert_eq!(
        (s.hca_cores, line(&s, "hca-cores").source),
        (HcaCores::Caller, Source::Variable)
    );
    assert_eq!((s.gpu, s.depth), (GpuSelect::Cuda(Some(3)), 1024));
    let c = Config {
        hca_cores: Some(HcaCores::Threads(4)),
        ..Config::default()
    };
    let s = with(&c, &vars).unwrap();
    assert_eq!(
        (s.hca_cores, line(&s, "hca-cores").source),
        (HcaCores::Threads(4), Source::Argument)
    );
}

#[test]
fn what_is_printed_parses_back_to_the_same_settings() {
    let c = Config {
        gpu: Some(GpuSelect::Host),
        hca_cores: Some(HcaCores::Caller),
        handler: Some(Handler::Producer),
        depth: Some(64),
        quiesce: Some(Duration::from_millis(7)),
        patience: Some(Duration::from_secs(2)),
        emulate_warp: Some(true),
        on_error: Some(OnError::Release),
        record: Some(Recorder::On(64)),
        fault: Some("seed=3; wqe=1: drop-doorbell; rank=7: kill-engine".into()),
        rank: Some(7),
        trace: Some(PathBuf::from("/tmp/t-%p.json")),
        roce: Some("udp://127.0.0.1".to_owned()),
        verbs: Some("rxe0:1?gid=3".to_owned()),
        roce_mtu: Some(1024),
        roce_timeout: Some(14),
        roce_retry: Some(2),
        roce_wrap: RoceWrap::default(),
        otherwise: Otherwise::default(),
    };
    let a = with(&c, &[]).unwrap();
    let printed: Vec<(&str, &str)> = a
        .explain()
        .iter()
        .map(|l| (l.variable, l.value.as_str()))
        .collect();
    let b = with(&Config::default(), &printed).unwrap();
    assert_eq!(a.explain().len(), b.explain().len());
    for (x, y) in a.explain().iter().zip(b.explain()) {
        assert_eq!((x.name, &x.value), (y.name, &y.value));
        assert_eq!((x.source, y.source), (Source::Argument, Source::Variable));
    }
}

#[test]
fn bad_values_are_refused_with_the_name_and_the_remedy() {
    for (name, value) in [
        ("DOORBELL_GPU", "tpu"),
        ("DOORBELL_HCA_CORES", "65"),
        ("DOORBELL_HCA_CORES", "\u{fffd}"),
        ("DOORBELL_HANDLER", "17"),
        ("DOORBELL_DEPTH", "100"),
        ("DOORBELL_QUIESCE_MS", "0"),
        ("DOORBELL_HOST_WARP", "2"),
        ("DOORBELL_ON_ERROR", "panic"),
        ("DOORBELL_RECORD", "33"),
        ("DOORBELL_FAULT", "wqe=1: panic"),
        ("DOORBELL_FAULT", "@/no/such/file"),
        ("DOORBELL_ROCE_MTU", "1500"),
        ("DOORBELL_ROCE_TIMEOUT", "32"),
        ("DOORBELL_ROCE_RETRY", "8"),
    ] {
        let text = with(&Config::default(), &[(name, value)])
            .unwrap_err()
            .to_string();
        assert!(
            text.contains(name) && text.contains(value) && text.contains("give"),
            "{text}"
        );
    }
    let c = Config {
        depth: Some(100),
        ..Config::default()
    };
    assert!(with(&c, &[]).unwrap_err().to_string().contains("argument"));
}

#[test]
fn a_single_core_is_driven_by_its_callers() {
    let s = Config::default().resolve_with(1, &|_| None).unwrap();
    assert_eq!(s.hca_cores, HcaCores::Caller);
    assert!(line(&s, "hca-cores").why.contains("one CPU core"));
}

#[test]
fn packets_are_repeated_for_as_long_as_a_job_bears_a_peer_that_stands_still() {
    let with = |secs, variables: &[(&str, &str)]| {
        let config = Config {
            patience: Some(Duration::from_secs(secs)),
            ..Config::default()
        };
        let lookup = |name: &str| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, v)| (*v).to_owned())
        };
        let settings = config.resolve_with(2, &lookup).expect("settings");
        assert_eq!(settings.roce_retry, 7);
        settings.roce_timeout
    };
    assert_eq!(with(2, &[]), 17, "the usual lasts longer");
    assert_eq!(with(11, &[]), 19);
    for secs in [60, 3600] {
        let lasts = Duration::from_nanos(8 * (4096 << with(secs, &[])));
        assert!(lasts >= Duration::from_secs(secs), "{secs}");
        assert!(lasts < 3 * Duration::from_secs(secs), "{secs}");
    }
    assert_eq!(with(86_400, &[]), 0, "no code lasts so long: without end");
    // Who says something means it.
    let said = [("DOORBELL_ROCE_TIMEOUT", "12")];
    assert_eq!(with(11, &said), 12);
}
