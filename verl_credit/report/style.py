"""The page's style sheet. Light only: the pictures and the colour scale are made for a light ground."""

CSS = """
:root{color-scheme:only light;--ink:#1d2126;--soft:#5b626b;--line:#e2e4e8;--ground:#fff;--quiet:#f7f7f5}
*{box-sizing:border-box}
html{background:var(--ground);-webkit-text-size-adjust:100%}
body{margin:0;color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
 "Liberation Sans",Arial,sans-serif}
main{max-width:66rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .5rem;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:3rem 0 1rem;padding-bottom:.4rem;border-bottom:1px solid var(--line)}
h3{font-size:1.05rem;line-height:1.35;margin:0;overflow-wrap:anywhere}
h4{font-size:.85rem;margin:0;font-weight:600}
p{margin:.5rem 0}
small,.aside,.facts,.gold{color:var(--soft)}
.lede{font-size:1.05rem;max-width:48rem}
.banner{margin:.35rem 0}
.banner,code{font:.82rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;
 color:var(--soft);overflow-wrap:anywhere}
.notice{background:#fdf6e3;border-left:3px solid #c9a227;padding:.6rem .9rem;max-width:48rem;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;max-width:48rem;font-variant-numeric:tabular-nums}
th,td{padding:.4rem .5rem;text-align:right;vertical-align:baseline;border-bottom:1px solid var(--line)}
th+th[scope=col]{white-space:nowrap}
th:first-child{text-align:left;padding-left:0}
th[scope=row]{font-weight:400}
.group th{font-size:.85rem;color:var(--soft);font-weight:600}
tbody+tbody .group th{padding-top:1.4rem}
td small{display:block;font-size:.75rem;line-height:1.2}
td.absent{color:var(--soft);font-style:italic}
.settings{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,26rem),1fr));gap:.3rem 2.5rem;margin:0;
 font-size:.85rem}
.settings div{display:flex;justify-content:space-between;gap:1rem;border-bottom:1px solid var(--line)}
.settings dt{color:var(--soft)}
.settings dd{margin:0;text-align:right;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:2rem 2.5rem}
figure{margin:0;display:flex;flex-direction:column;min-width:0}
figcaption{font-size:.85rem;line-height:1.45;color:var(--soft);margin-bottom:.6rem}
figcaption b{display:block;font-size:1rem;color:var(--ink)}
figure img{width:100%;height:auto;margin-top:auto}
.legend{background:var(--quiet);padding:1rem 1.25rem;border-radius:6px;font-size:.88rem;margin-bottom:2rem}
.scale{display:flex;align-items:center;gap:.6rem;margin:.15rem 0;max-width:36rem}
.scale-name{flex:0 0 9rem;font-weight:600}
.scale-end{font-variant-numeric:tabular-nums;flex:0 0 3.6rem;text-align:right}
.scale-end:last-child{text-align:left}
.ramp{flex:1;height:.8rem;border-radius:3px;background:linear-gradient(90deg,#f29d5c,#f6f5f2,#76b0e6);
 border:1px solid #d9dbdf;min-width:3rem}
.legend dl{margin:.8rem 0 0}
.legend dt{font-weight:600;float:left;clear:left;margin-right:.4em}
.legend dd{margin:0 0 .3rem}
.trajectory{margin:0 0 3rem}
.trajectory header{margin-bottom:.9rem}
.facts,.gold{font-size:.88rem;margin:.2rem 0}
.verdict{font-weight:700;color:var(--ink)}
.verdict::before{content:"";display:inline-block;width:.6em;height:.6em;border-radius:50%;margin-right:.4em;
 border:2px solid currentColor}
.verdict.won::before{background:currentColor}
.turns{list-style:none;margin:0;padding:0}
.turns>li{margin:0 0 .9rem}
.block{border-left:8px solid;padding:.15rem 0 .35rem .9rem;margin:0 0 .35rem}
.head{display:flex;flex-wrap:wrap;align-items:center;gap:.3rem .7rem;margin-bottom:.25rem}
.chip{font-size:.8rem;line-height:1.4;padding:.1rem .55rem;border-radius:4px;color:var(--ink);
 border:1px solid rgba(0,0,0,.12);font-variant-numeric:tabular-nums}
.chip i{font-style:normal}
.chip.none{background:var(--ground);color:var(--soft);border-style:dashed}
.aside{font-size:.8rem}
li>p.aside{margin:0 0 0 calc(8px + .9rem)}
.text{font:.83rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;white-space:pre-wrap;
 overflow-wrap:anywhere;max-height:24rem;overflow-y:auto}
.observation{margin-left:1.75rem}
.observation .text{color:#3c434b;background:var(--quiet);padding:.5rem .7rem;border-radius:4px}
.mark{color:#767c85}
@media (max-width:34rem){
 main{padding:1.5rem 1rem 3rem}
 .observation{margin-left:.6rem}
 table{font-size:.85rem}
 th,td{padding:.35rem .3rem}
 .group th{font-size:.75rem}
 .scale{flex-wrap:wrap}
 .scale-name{flex-basis:100%}
 .scale-end{flex-basis:3.2rem}
}
@media print{.text{max-height:none;overflow:visible}.trajectory,figure{break-inside:avoid}
 .chip,.ramp,.block{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
